"""Store and attention on a GPU: the Triton kernels behind the interface of :mod:`sglang_oscar.kernels`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.store import Rotation, prepare_rotation, rotate_queries, store
from sglang_oscar.batch import Batch
from sglang_oscar.runtime import LayerParams


@dataclass(frozen=True)
class PreparedLayer:
    """Rotations of a layer in the form that the kernels take; None where nothing is rotated."""

    key: Rotation | None
    value: Rotation | None
    value_back: Rotation | None


class TritonKernels:
    """Args:
    layers: constants of all layers.
    dtype: dtype of queries, keys and values, bfloat16 or float16.
    """

    def __init__(self, layers: list[LayerParams], dtype: torch.dtype) -> None:
        self._prepared = {id(layer): _prepare(layer, dtype) for layer in layers}

    def decode(
        self, layer: LayerParams, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """See :class:`sglang_oscar.kernels.Kernels`."""
        rotations = self._prepared[id(layer)]
        rotated = store(
            layer.cache, batch.slots, k, v, rotations.key, rotations.value, layer.k_clip, layer.v_clip, q=q
        )
        assert rotated is not None
        return _rotate(decode(layer.cache, batch.tables, rotated, sm_scale), rotations.value_back)

    def extend(
        self, layer: LayerParams, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """See :class:`sglang_oscar.kernels.Kernels`."""
        assert batch.chunk_starts is not None
        rotations = self._prepared[id(layer)]
        values = _rotate(v, rotations.value)
        rotated = _rotate(q, rotations.key)
        out = extend(layer.cache, batch.tables, q, k, values, batch.chunk_starts, rotated, sm_scale)
        store(layer.cache, batch.slots, k, v, rotations.key, rotations.value, layer.k_clip, layer.v_clip)
        return _rotate(out, rotations.value_back)


def _prepare(layer: LayerParams, dtype: torch.dtype) -> PreparedLayer:
    back = None if layer.v_rotation is None else layer.v_rotation.T.contiguous()
    return PreparedLayer(
        key=prepare_rotation(layer.k_rotation, dtype),
        value=prepare_rotation(layer.v_rotation, dtype),
        value_back=prepare_rotation(back, dtype),
    )


def _rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    return x if rotation is None else rotate_queries(x, rotation)
