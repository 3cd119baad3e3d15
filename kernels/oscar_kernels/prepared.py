"""Formats in the form that the GPU kernels take: matrices split for the tensor cores, once per server.

A float32 matrix becomes 16-bit terms that sum to it, so that a product with 16-bit vectors is exact in every term and
has float32 accuracy in the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oscar_kernels.cache import LayerCache, check_layouts
from oscar_kernels.codebook import Codebook
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import RowLayout

# float16 terms of a matrix are kept times a power of two, so that their low parts are no subnormals: this one, or as
# much less as keeps the largest entry at FP16_LARGEST_TERM at most.
FP16_TERM_SCALE = 4096.0
FP16_LARGEST_TERM = 32768.0
TERMS = {torch.bfloat16: 3, torch.float16: 2}
"""16-bit terms that together hold a float32 matrix: 3 x 8 or 2 x 11 bits of mantissa."""


@dataclass(frozen=True, eq=False)
class SplitMatrix:
    """A matrix split for the tensor cores, or one per kv head.

    ``terms`` [sets, n, head_dim, head_dim] sum over n to ``scale`` times the matrix; there is one set, or one per kv
    head. ``arranged``: elements are in the order of :func:`oscar_kernels.cuda.store.arrange`, not in rows.
    """

    terms: torch.Tensor
    scale: float
    arranged: bool = False

    @property
    def sets(self) -> int:
        """1, or the number of kv heads where each has its own matrix."""
        return self.terms.shape[0]

    @property
    def count(self) -> int:
        """Terms of a matrix."""
        return self.terms.shape[1]

    def check(self, heads: int, dtype: torch.dtype, arranged: bool) -> None:
        """Refuse vectors that a kernel cannot multiply.

        Args:
            heads: heads of the vectors.
            dtype: dtype of the vectors.
            arranged: whether the kernel reads terms in the order of the CUDA kernel.

        Raises:
            ValueError: number of heads, dtype or order do not fit.
        """
        if self.arranged != arranged:
            raise ValueError(
                "the CUDA kernels take layers from oscar_kernels.cuda.store.arrange, others those before it"
            )
        if heads % self.sets or self.terms.dtype != dtype:
            raise ValueError(
                f"a matrix for {self.sets} kv heads of {self.terms.dtype} does not fit {heads} heads of {dtype}"
            )


class Output(NamedTuple):
    """Where attention writes: outputs and log-sum-exps, and what outputs are multiplied by before; each None for the
    kernel's own, for nothing, and for nothing."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    reading: SplitMatrix | None


@dataclass(frozen=True, eq=False)
class PreparedSide:
    """Keys or values of a layer.

    Args:
        layout: of the rows.
        matrix: what vectors are multiplied by before they are stored; None for nothing.
        reading: what queries (of keys) or outputs (of values) are multiplied by; None for nothing.
        center: float32 [kv_heads, head_dim], contiguous, subtracted from what is multiplied; None for nothing.
        plain_center: ``center`` in the basis before the matrix.
        clip, gain: see :class:`oscar_kernels.transform.SideTransform`.
        codebook: what codes of that coding stand for, on the device of the cache.
    """

    layout: RowLayout
    matrix: SplitMatrix | None
    reading: SplitMatrix | None
    center: torch.Tensor | None
    plain_center: torch.Tensor | None
    clip: float
    gain: float
    codebook: Codebook | None = None

    @property
    def coding(self) -> str:
        """What codes stand for, see :class:`oscar_kernels.layout.RowLayout`."""
        return self.layout.coding


@dataclass(frozen=True, eq=False)
class PreparedLayer:
    """A :class:`oscar_kernels.format.LayerFormat` as store kernels take it."""

    key: PreparedSide
    value: PreparedSide

    def check(self, cache: LayerCache) -> None:
        """Refuse a cache of other rows.

        Raises:
            ValueError: layouts differ.
        """
        check_layouts(cache, self.key.layout, self.value.layout)


def split_matrix(matrix: torch.Tensor | None, dtype: torch.dtype) -> SplitMatrix | None:
    """Split a matrix once, for vectors of ``dtype``.

    Args:
        matrix: float32 [head_dim, head_dim] or [kv_heads, head_dim, head_dim] on the device of the cache, or None for
            identity.
        dtype: dtype of the vectors that will be multiplied by it, bfloat16 or float16.

    Raises:
        ValueError: another dtype, or a matrix that is not finite.
    """
    if matrix is None:
        return None
    if dtype not in TERMS:
        raise ValueError(f"keys, values and queries must be bfloat16 or float16, got {dtype}")
    largest = float(matrix.abs().max())
    if not math.isfinite(largest):
        raise ValueError("a matrix must be finite")
    scale = 1.0
    if dtype == torch.float16:
        # frexp: largest is below 2^exponent.
        scale = min(FP16_TERM_SCALE, FP16_LARGEST_TERM / 2.0 ** math.frexp(largest)[1])
    rest = matrix.double() * scale
    terms = []
    for _ in range(TERMS[dtype]):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1].double()
    stacked = torch.stack(terms, dim=-3)
    return SplitMatrix((stacked if matrix.dim() == 3 else stacked[None]).contiguous(), scale)


def prepare(layer: LayerFormat, dtype: torch.dtype) -> PreparedLayer:
    """What the kernels take for a layer.

    Args:
        layer: its tensors on the device of the cache.
        dtype: dtype of keys, values and queries, bfloat16 or float16.

    Raises:
        ValueError: another dtype.
    """

    def side(
        of: SideFormat, layout: RowLayout, matrix: SplitMatrix | None, reading: SplitMatrix | None
    ) -> PreparedSide:
        transform = of.transform
        center = None if transform.center is None else transform.center.contiguous()
        return PreparedSide(
            layout, matrix, reading, center, transform.plain_center, transform.clip, transform.gain, of.codebook
        )

    key, value = layer.key.transform, layer.value.transform
    written = split_matrix(key.matrix, dtype)
    # Of an orthogonal matrix one copy serves keys and queries.
    read = written if key.dual is None else split_matrix(key.dual, dtype)
    return PreparedLayer(
        side(layer.key, layer.key_layout, written, read),
        side(layer.value, layer.value_layout, split_matrix(value.matrix, dtype), split_matrix(value.back, dtype)),
    )
