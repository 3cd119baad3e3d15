"""What happens to the keys, or to the values, of a layer before they are quantized, and how it is undone on reading.

With x a vector of a head, T the matrix, c the center and D = T^-T the dual:

* stored: quantize(x T - c), clipped at ``clip``, with scales and zero points fitted to ``gain``;
* what reads stored *keys*, a query q, becomes q D: q D . x T = q . x. The center shifts the logits of all tokens of
  a query alike, so softmax does not see it;
* what is read from stored *values*, an attention output o, becomes o D^T: o = p x T gives o D^T = p x.

For an orthogonal matrix D = T: one matrix does both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class SideTransform:
    """Transform of one side (keys or values) of one layer.

    Args:
        matrix: float32 [head_dim, head_dim], or [kv_heads, head_dim, head_dim] with a matrix of its own for every kv
            head; vectors are multiplied by it from the right. None is the identity, which costs nothing.
        dual: the inverse transpose of ``matrix``, in its shape; None where ``matrix`` is orthogonal and serves itself.
        center: float32 [kv_heads, head_dim], subtracted from the transformed vectors; None for nothing.
        clip: ratio of channels that are not clipped, see :func:`oscar_kernels.codec.clip`; 1 does not clip.
        gain: of scales and zero points fitted to the codes, see :func:`oscar_kernels.codec.fitted_parameters`; 0 keeps
            those of the range.

    Raises:
        ValueError: a shape, a dtype or a number does not fit.
    """

    matrix: torch.Tensor | None = None
    dual: torch.Tensor | None = None
    center: torch.Tensor | None = None
    clip: float = 1.0
    gain: float = 0.0

    def __post_init__(self) -> None:
        for name, x in (("matrix", self.matrix), ("dual", self.dual), ("center", self.center)):
            if x is not None and x.dtype != torch.float32:
                raise ValueError(f"{name} of a transform must be float32, got {x.dtype}")
        matrix, dual, center = self.matrix, self.dual, self.center
        if matrix is not None and (matrix.dim() not in (2, 3) or matrix.shape[-1] != matrix.shape[-2]):
            raise ValueError(
                f"matrix must be [head_dim, head_dim] or [kv_heads, head_dim, head_dim], got {list(matrix.shape)}"
            )
        if dual is not None and (matrix is None or dual.shape != matrix.shape):
            of = "none" if matrix is None else str(list(matrix.shape))
            raise ValueError(f"dual must have the shape of the matrix ({of}), got {list(dual.shape)}")
        if center is not None and center.dim() != 2:
            raise ValueError(f"center must be [kv_heads, head_dim], got {list(center.shape)}")
        if center is not None and matrix is not None:
            heads = center.shape[0] if matrix.dim() == 2 else matrix.shape[0]
            if tuple(center.shape) != (heads, matrix.shape[-1]):
                raise ValueError(f"center {list(center.shape)} does not fit the matrix {list(matrix.shape)}")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip must be above 0 and at most 1, got {self.clip}")
        if not 0 <= self.gain < math.inf:
            raise ValueError(f"gain must be 0 or a positive number, got {self.gain}")

    @property
    def kv_heads(self) -> int | None:
        """Number of kv heads that the tensors are for; None where they are the same for all."""
        if self.center is not None:
            return self.center.shape[0]
        return self.matrix.shape[0] if self.matrix is not None and self.matrix.dim() == 3 else None

    @property
    def head_dim(self) -> int | None:
        """Channels that the tensors are for; None where there are none."""
        some = self.center if self.matrix is None else self.matrix
        return None if some is None else some.shape[-1]

    @property
    def per_head(self) -> bool:
        """Whether every kv head has a matrix of its own."""
        return self.matrix is not None and self.matrix.dim() == 3

    @property
    def reading(self) -> torch.Tensor | None:
        """What queries are multiplied by, in the shape of ``matrix``; None for the identity."""
        return self.matrix if self.dual is None else self.dual

    @cached_property
    def back(self) -> torch.Tensor | None:
        """What outputs are multiplied by, contiguous, in the shape of ``matrix``; None for the identity."""
        return None if self.reading is None else self.reading.mT.contiguous()

    @cached_property
    def plain_center(self) -> torch.Tensor | None:
        """``center`` in the basis before the transform, float32 [kv_heads, head_dim]."""
        if self.center is None or self.reading is None:
            return self.center
        if self.per_head:
            return (self.center[:, None] @ self.reading.mT)[:, 0]
        return self.center @ self.reading.T

    def of_heads(self, heads: slice) -> SideTransform:
        """The transform of some of the kv heads, such as those of a tensor-parallel rank."""
        if self.kv_heads is None:
            return self
        matrix, dual = (x[heads] if x is not None and self.per_head else x for x in (self.matrix, self.dual))
        center = None if self.center is None else self.center[heads].contiguous()
        return replace(self, matrix=matrix, dual=dual, center=center)

    def to(self, device: torch.device | str) -> SideTransform:
        """The same on another device."""
        names = ("matrix", "dual", "center")
        moved = {name: x.to(device) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **moved)
