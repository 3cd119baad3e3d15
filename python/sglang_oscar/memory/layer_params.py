"""Constants of one layer: what its keys and values are multiplied by, and how they are quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.cache import LayerCache


@dataclass(frozen=True)
class LayerParams:
    """Constants of one layer.

    ``k_rotation`` and ``v_rotation`` are float32 [head_dim, head_dim] on the device, or None where nothing is to
    be rotated: for the identity, and for values whose rotation is absorbed into the weights. A transform need not be
    orthogonal: ``q_rotation`` is then the inverse transpose of ``k_rotation``, ``v_back`` that of ``v_rotation``, and
    None means that they are the same. ``k_center`` is float32 [kv_heads, head_dim] of this rank, subtracted from the
    transformed keys, or None. ``k_gain`` and ``v_gain`` are those of scales fitted to the codes,
    0 where scales are those of the range.
    """

    cache: LayerCache
    k_rotation: torch.Tensor | None
    v_rotation: torch.Tensor | None
    k_clip: float
    v_clip: float
    q_rotation: torch.Tensor | None = None
    v_back: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    k_gain: float = 0.0
    v_gain: float = 0.0

    @property
    def query_matrix(self) -> torch.Tensor | None:
        """What queries are multiplied by; None for the identity."""
        return self.k_rotation if self.q_rotation is None else self.q_rotation

    @property
    def output_matrix(self) -> torch.Tensor | None:
        """What attention outputs are multiplied by; None for the identity."""
        back = self.v_rotation if self.v_back is None else self.v_back
        return None if self.v_rotation is None or back is None else back.T.contiguous()

    @property
    def plain_center(self) -> torch.Tensor | None:
        """``k_center`` in the basis of the keys as they are, float32 [kv_heads, head_dim]."""
        if self.k_center is None or self.query_matrix is None:
            return self.k_center
        return self.k_center @ self.query_matrix.T
