"""Store and attention on a GPU (:mod:`sglang_oscar.attention.layer_attention`): CUDA, Triton and FlashInfer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.extend_plan import ExtendPlan
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.store import Rotation, prepare_rotation, rotate_queries, store
from sglang_oscar.attention import decode_choice
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.extend_choice import ragged_extend
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.layer_params import LayerParams

logger = logging.getLogger(__name__)

MOST_CUDA_TOKENS = 128
"""Larger decode batches are stored by the Triton kernel, which reads rotations less often: half the time at 512."""


@dataclass(frozen=True)
class PreparedLayer:
    """Rotations of a layer in the form that the kernels take; None where nothing is rotated.

    ``chunk_center`` [kv_heads, head_dim] is what the keys of a chunk lose as they are, before any rotation.
    """

    key: Rotation | None
    value: Rotation | None
    value_back: Rotation | None
    query: Rotation | None
    chunk_center: torch.Tensor | None


@dataclass(frozen=True)
class Arranged:
    """Rotations of a layer in the order that the CUDA store kernel reads."""

    key: Rotation | None
    value: Rotation | None
    query: Rotation | None


class GpuKernels:
    """Args:
    cache: of the pool that is attended to.
    dtype: dtype of queries, keys and values, bfloat16 or float16.
    device: the GPU.
    q_heads: query heads on this rank.

    Raises:
        Int2Error: kernels that are asked for cannot be built, or cannot do this.
    """

    def __init__(self, cache: Int2Cache, dtype: torch.dtype, device: torch.device, q_heads: int) -> None:
        self._prepared = {id(layer): _prepare(layer, dtype) for layer in cache.layers.values()}
        self._page_size = cache.page_size
        self._decode = decode_choice.choose(
            cache.settings.decode_backend, cache.first_layer.cache, cache.page_size, q_heads, dtype,
            cache.rows.ring_start.shape[0], cache.plan.extend is not None,
        )  # fmt: skip
        self._arranged: dict[int, Arranged] | None = None
        if isinstance(self._decode, decode_choice.CudaDecode):
            self._arranged = {key: _arrange(prepared) for key, prepared in self._prepared.items()}
        plan = cache.plan
        self._ragged: RaggedExtend | None = None
        if plan.extend is None:
            logger.info("int2 extend: Triton kernel for chunk and prefix")
        else:
            self._ragged = ragged_extend(plan.extend, plan.geometry.layout, plan.geometry.windows, device, self._decode)
            logger.info(
                "int2 extend: FlashInfer (%s) for chunk and dequantized prefix, decode kernel for that of short chunks",
                plan.extend.kernels,
            )

    def decode(
        self, layer: LayerParams, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.layer_attention.Kernels`."""
        rotations = self._prepared[id(layer)]
        rotated: torch.Tensor | None
        if self._arranged is None or len(q) > MOST_CUDA_TOKENS:
            rotated = store(
                layer.cache, batch.slots, k, v, rotations.key, rotations.value, layer.k_clip, layer.v_clip, q=q,
                k_center=layer.k_center, q_rotation=rotations.query, k_gain=layer.k_gain,
                v_gain=layer.v_gain,
            )  # fmt: skip
        else:
            arranged = self._arranged[id(layer)]
            rotated = cuda_store.store(
                layer.cache, self._page_size, batch.slots, k, v, q, arranged.key, arranged.value, layer.k_clip,
                layer.v_clip, layer.k_center, arranged.query, decoding=True, k_gain=layer.k_gain,
                v_gain=layer.v_gain,
            )  # fmt: skip
        assert rotated is not None
        return _rotate(self._decode(layer.cache, batch.tables, rotated, sm_scale), rotations.value_back)

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """See :class:`sglang_oscar.attention.layer_attention.Kernels`."""
        if self._ragged is None:
            return None
        assert batch.prefix_lens is not None
        assert batch.extend_lens is not None
        return self._ragged.plan(batch.tables, batch.prefix_lens, batch.extend_lens)

    def extend(
        self, layer: LayerParams, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float
    ) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.layer_attention.Kernels`."""
        rotations, plan, starts = self._prepared[id(layer)], batch.extend_plan, batch.chunk_starts
        assert starts is not None
        # Without a prefix nothing that is in the basis of the cache is attended to: values need no rotation, keys
        # need not be centered.
        cached = plan is None or plan.has_prefix
        values = _rotate(v, rotations.value) if cached else v
        rotated = _rotate(q, rotations.query) if cached else None
        chunk = k
        if cached and rotations.chunk_center is not None:
            chunk = (k - rotations.chunk_center).to(k.dtype)
        if plan is None:
            assert rotated is not None
            out = extend(layer.cache, batch.tables, q, chunk, values, starts, rotated, sm_scale)
        else:
            assert self._ragged is not None
            out = self._ragged.run(plan, layer.cache, batch.tables, q, chunk, values, starts, rotated, sm_scale)
        store(
            layer.cache, batch.slots, k, v, rotations.key, rotations.value, layer.k_clip, layer.v_clip,
            k_center=layer.k_center, k_gain=layer.k_gain, v_gain=layer.v_gain,
        )  # fmt: skip
        if plan is not None and plan.decoding is not None:
            assert rotated is not None
            own = plan.decoding.tokens
            out[own] = self._decode(layer.cache, plan.decoding.tables, rotated[own], sm_scale)
        return _rotate(out, rotations.value_back) if cached else out


def _prepare(layer: LayerParams, dtype: torch.dtype) -> PreparedLayer:
    key = prepare_rotation(layer.k_rotation, dtype)
    return PreparedLayer(
        key=key,
        value=prepare_rotation(layer.v_rotation, dtype),
        value_back=prepare_rotation(layer.output_matrix, dtype),
        # Most often queries are rotated like keys: one copy of the matrix serves both.
        query=key if layer.query_matrix is layer.k_rotation else prepare_rotation(layer.query_matrix, dtype),
        chunk_center=layer.plain_center,
    )


def _arrange(prepared: PreparedLayer) -> Arranged:
    key = cuda_store.arrange(prepared.key)
    query = key if prepared.query is prepared.key else cuda_store.arrange(prepared.query)
    return Arranged(key, cuda_store.arrange(prepared.value), query)


def _rotate(x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    return x if rotation is None else rotate_queries(x, rotation)
