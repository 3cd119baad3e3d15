"""How the keys and values of a layer are stored: everything that gives the bytes of its rows their meaning.

A :class:`LayerFormat` is the one description that loaders make, memory is sized from, kernels take and a cache is
known by: :func:`fingerprint` of the formats of all layers says whether rows that one server wrote can be read by
another. A :class:`CutFormat` has several: neighbouring kv heads of a layer may have rows of their own, apart from those
of the others, as if they were a layer of fewer heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from oscar_kernels.codebook import Codebook
from oscar_kernels.layout import AFFINE, AFFINE_VERSION, CODEBOOK, CODINGS, EXACT, FORMAT_VERSION, RowLayout
from oscar_kernels.transform import SideTransform


@dataclass(frozen=True, eq=False)
class SideFormat:
    """How one side (keys or values) of a layer is stored.

    Args:
        group_size: channels that share a scale and a zero point.
        scale_dtype: dtype of scale and zero point.
        bits: bits of a code, or 16 where the side is left exact. Then group size, scale dtype, clip ratio and gain mean
            nothing.
        transform: what happens to vectors before they are quantized, or stored in 16 bits.
        exact_dtype: dtype of a side that is left exact.
        coding: what codes stand for, see :class:`oscar_kernels.layout.RowLayout`.
        codebook: the points of coding codebook, given with that alone. Group size and clip ratio then mean nothing.

    Raises:
        ValueError: a codebook is missing, or given for another coding.
    """

    group_size: int
    scale_dtype: torch.dtype = torch.bfloat16
    bits: int = 2
    transform: SideTransform = field(default_factory=SideTransform)
    exact_dtype: torch.dtype = torch.bfloat16
    coding: str = AFFINE
    codebook: Codebook | None = None

    def __post_init__(self) -> None:
        if (self.codebook is not None) != (self.coding == CODEBOOK):
            has = "none" if self.codebook is None else "one"
            raise ValueError(f"coding {CODEBOOK}, and no other, needs a codebook; coding {self.coding} has {has}")

    def layout(self, kv_heads: int, head_dim: int) -> RowLayout:
        """Geometry of this side's rows.

        Raises:
            ValueError: such rows cannot be stored.
        """
        return RowLayout(
            kv_heads, head_dim, self.group_size, self.scale_dtype, self.bits, self.exact_dtype, self.coding
        )

    def of_heads(self, heads: slice) -> SideFormat:
        """The format of some of the kv heads, such as those of a tensor-parallel rank."""
        codebook = None if self.codebook is None else self.codebook.of_heads(heads)
        return replace(self, transform=self.transform.of_heads(heads), codebook=codebook)

    def to(self, device: torch.device | str) -> SideFormat:
        """The same with its tensors on another device."""
        codebook = None if self.codebook is None else self.codebook.to(device)
        return replace(self, transform=self.transform.to(device), codebook=codebook)


@dataclass(frozen=True, eq=False)
class LayerFormat:
    """How one attention layer is stored.

    Args:
        kv_heads: kv heads: of the model, or of one tensor-parallel rank (:meth:`of_heads`).
        head_dim: channels per head of the keys.
        key, value: each side's format.
        value_head_dim: channels per head of the values, 64, 128 or 256; given as 0 where keys have as many.

    Raises:
        ValueError: rows cannot be stored so, a transform or a codebook is of other heads, or values have a codebook.
    """

    kv_heads: int
    head_dim: int
    key: SideFormat
    value: SideFormat
    value_head_dim: int = 0

    def __post_init__(self) -> None:
        if self.value_head_dim == 0:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        _ = self.key_layout, self.value_layout  # raise where rows cannot be stored so
        if self.value_head_dim & (self.value_head_dim - 1):
            raise ValueError(f"heads of values must have 64, 128 or 256 channels, got {self.value_head_dim}")
        for (name, side), head_dim in zip(self.sides, (self.head_dim, self.value_head_dim), strict=True):
            transform = side.transform
            if transform.head_dim not in (None, head_dim) or transform.kv_heads not in (None, self.kv_heads):
                raise ValueError(
                    f"the {name} transform is for {transform.kv_heads or self.kv_heads} kv heads of "
                    f"{transform.head_dim}, the layer has {self.kv_heads} of {head_dim}"
                )
            book = side.codebook
            if book is not None and (book.kv_heads, book.head_dim) != (self.kv_heads, head_dim):
                raise ValueError(
                    f"the {name} codebook is for {book.kv_heads} kv heads of {book.head_dim}, "
                    f"the layer has {self.kv_heads} of {head_dim}"
                )
        if self.value.codebook is not None:
            raise ValueError("values cannot have a codebook, only keys can")
        if self.value.transform.center is not None:
            raise ValueError("values cannot be centered: attention outputs would lack the center")

    @property
    def parts(self) -> tuple[LayerFormat, ...]:
        """The layer itself: all its kv heads have rows of one format."""
        return (self,)

    @property
    def sides(self) -> tuple[tuple[str, SideFormat], tuple[str, SideFormat]]:
        """Both sides with their names."""
        return ("key", self.key), ("value", self.value)

    @cached_property
    def key_layout(self) -> RowLayout:
        """Geometry of the key rows."""
        return self.key.layout(self.kv_heads, self.head_dim)

    @cached_property
    def value_layout(self) -> RowLayout:
        """Geometry of the value rows."""
        return self.value.layout(self.kv_heads, self.value_head_dim)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in this layer: its key row and its value row."""
        return self.key_layout.row_bytes + self.value_layout.row_bytes

    @property
    def elements(self) -> int:
        """Key and value channels of one token in this layer."""
        return self.kv_heads * (self.head_dim + self.value_head_dim)

    def with_transforms(self, key: SideTransform, value: SideTransform) -> LayerFormat:
        """The same rows with other transforms."""
        return replace(self, key=replace(self.key, transform=key), value=replace(self.value, transform=value))

    def of_heads(self, heads: slice) -> LayerFormat:
        """The format of some of the kv heads, such as those of a tensor-parallel rank."""
        kv_heads = len(range(self.kv_heads)[heads])
        return replace(self, kv_heads=kv_heads, key=self.key.of_heads(heads), value=self.value.of_heads(heads))

    def to(self, device: torch.device | str) -> LayerFormat:
        """The same with its tensors on another device."""
        return replace(self, key=self.key.to(device), value=self.value.to(device))


@dataclass(frozen=True, eq=False)
class CutFormat:
    """How one attention layer is stored whose kv heads do not all have the same format.

    Args:
        parts: of neighbouring kv heads, in their order; two or more.

    Raises:
        ValueError: a single part, or parts with heads of different sizes.
    """

    parts: tuple[LayerFormat, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or len({(part.head_dim, part.value_head_dim) for part in self.parts}) > 1:
            raise ValueError("a layer is cut into two or more parts with heads of one size")

    @property
    def kv_heads(self) -> int:
        """kv heads of all parts."""
        return sum(part.kv_heads for part in self.parts)

    @property
    def head_dim(self) -> int:
        """Channels per head of the keys."""
        return self.parts[0].head_dim

    @property
    def value_head_dim(self) -> int:
        """Channels per head of the values."""
        return self.parts[0].value_head_dim

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in this layer: the key rows and value rows of all parts."""
        return sum(part.cell_bytes for part in self.parts)

    @property
    def elements(self) -> int:
        """Key and value channels of one token in this layer."""
        return sum(part.elements for part in self.parts)

    def of_heads(self, heads: slice) -> AnyFormat:
        """The format of some neighbouring kv heads, such as those of a tensor-parallel rank: without a cut where all of
        them lie in one part."""
        wanted, first, found = range(self.kv_heads)[heads], 0, []
        for part in self.parts:
            begin, end = max(wanted.start - first, 0), min(wanted.stop - first, part.kv_heads)
            if begin < end:
                found.append(part.of_heads(slice(begin, end)))
            first += part.kv_heads
        return found[0] if len(found) == 1 else CutFormat(tuple(found))

    def to(self, device: torch.device | str) -> CutFormat:
        """The same with its tensors on another device."""
        return CutFormat(tuple(part.to(device) for part in self.parts))


AnyFormat = LayerFormat | CutFormat
"""Of a layer; ``parts`` are what is stored apart."""


def parts_of(formats: Iterable[AnyFormat]) -> list[LayerFormat]:
    """What is stored apart, of all layers."""
    return [part for layer in formats for part in layer.parts]


def any_cut(formats: Iterable[AnyFormat]) -> bool:
    """Whether a layer has more than one part."""
    return any(len(layer.parts) > 1 for layer in formats)


def mean_bits(formats: Iterable[AnyFormat]) -> float:
    """Stored bits per key or value channel over all layers, scales and zero points included."""
    formats = list(formats)
    return 8 * sum(layer.cell_bytes for layer in formats) / sum(layer.elements for layer in formats)


def code_widths(formats: Iterable[AnyFormat]) -> str:
    """Bits of codes over all layers, in words, with codings where they are not all affine; 16 is a side that is left
    exact.

    >>> side, symmetric = SideFormat(64), SideFormat(64, coding="symmetric")
    >>> code_widths([LayerFormat(1, 64, SideFormat(64, bits=3), side), LayerFormat(1, 64, side, side)])
    'keys 2 to 3, values 2'
    >>> code_widths([LayerFormat(1, 64, side, symmetric)])
    'keys 2, values 2 (symmetric)'
    """
    said = []
    sides = zip(*((of.key, of.value) for of in parts_of(formats)), strict=True)
    for name, of_layers in zip(("keys", "values"), sides, strict=True):
        bits = sorted({side.bits for side in of_layers})
        codings = [coding for coding in CODINGS if any(side.coding == coding for side in of_layers)]
        more = f" to {bits[-1]}" if len(bits) > 1 else ""
        said.append(f"{name} {bits[0]}{more}" + (f" ({', '.join(codings)})" if codings != [AFFINE] else ""))
    return ", ".join(said)


def fingerprint(formats: Mapping[int, AnyFormat]) -> str:
    """SHA-256, in hex, of what the rows of a model's layers mean.

    Equal fingerprints: rows of either cache can be read by the other. It covers the version of the row format
    (:data:`oscar_kernels.layout.FORMAT_VERSION`, or ``AFFINE_VERSION`` where all rows are affine or exact) and per
    global layer id and side the heads, bits, coding, group size, scale dtype, clip ratio, gain (of a side that is left
    exact its dtype in place of these four) and the bytes of matrix, dual, center and codebook. It depends
    neither on the device nor, if given the formats of the whole model, on tensor parallelism. The identity and a matrix
    of ones and zeros count as different. Of a layer that is cut all this is covered part by part.

    Args:
        formats: of all layers of the model, by global layer id.
    """
    codings = {side.coding for part in parts_of(formats.values()) for _, side in part.sides}
    version = AFFINE_VERSION if codings <= {AFFINE} else FORMAT_VERSION
    digest = hashlib.sha256(f"oscar rows {version}\n".encode())
    for layer_id, layer in [(number, part) for number, of in sorted(formats.items()) for part in of.parts]:
        apart = f"/{layer.value_head_dim}" if layer.value_head_dim != layer.head_dim else ""
        digest.update(f"layer {layer_id} heads {layer.kv_heads} x {layer.head_dim}{apart}\n".encode())
        for name, side in layer.sides:
            transform = side.transform
            if side.bits == EXACT:
                digest.update(f"{name} bits {side.bits} dtype {side.exact_dtype}\n".encode())
            elif side.codebook is not None:
                points, factor = side.codebook.points.cpu(), side.codebook.factor.cpu()
                digest.update(f"{name} codebook scale {side.scale_dtype} gain {float(transform.gain).hex()}\n".encode())
                digest.update(points.numpy().tobytes() + factor.numpy().astype("<f4").tobytes())
            else:
                if side.coding != AFFINE:
                    digest.update(f"coding {side.coding}\n".encode())
                digest.update(
                    f"{name} bits {side.bits} group {side.group_size} scale {side.scale_dtype} "
                    f"clip {float(transform.clip).hex()} gain {float(transform.gain).hex()}\n".encode()
                )
            for part in ("matrix", "dual", "center"):
                x: torch.Tensor | None = getattr(transform, part)
                digest.update(f"{part} {None if x is None else list(x.shape)}\n".encode())
                if x is not None:
                    digest.update(x.detach().cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()
