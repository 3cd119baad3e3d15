"""What a token of the cache, a window and a sink cost on a rank, and which heads a rank keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from oscar_kernels.cache import Windows
from oscar_kernels.format import AnyFormat, LayerFormat, SideFormat, parts_of
from oscar_kernels.layout import EXACT, EXACT_DTYPES, RowLayout, largest_group
from sglang_oscar.errors import Int2Error
from sglang_oscar.names import DEFAULT_GROUP_SIZE, GROUP_SIZE
from sglang_oscar.settings import Settings

GIB = 1 << 30
RING_STEP = 8
"""Ring sizes that recent window and new tokens are rounded up to, tokens."""


@dataclass(frozen=True)
class Geometry:
    """What one token, one window and one sink block cost, over all layers of this rank.

    Args:
        formats: of the layers on this rank, with the heads of this rank, by global layer id. Rows may differ from layer
            to layer, between keys and values, and between parts of a layer.
        windows: sizes of the 16-bit windows.
        window_dtype: dtype of the windows.
    """

    formats: Mapping[int, AnyFormat]
    windows: Windows
    window_dtype: torch.dtype

    @classmethod
    def uniform(cls, layout: RowLayout, windows: Windows, window_dtype: torch.dtype, layers: int) -> Geometry:
        """Of ``layers`` layers whose keys and values all have rows of one layout."""
        side = SideFormat(layout.group_size, layout.scale_dtype, layout.bits, exact_dtype=layout.exact_dtype)
        return cls(
            dict.fromkeys(range(layers), LayerFormat(layout.kv_heads, layout.head_dim, side, side)),
            windows,
            window_dtype,
        )

    @property
    def any_layer(self) -> AnyFormat:
        """For what all layers of a model have in common."""
        return next(iter(self.formats.values()))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in the history pool: K and V rows of all layers."""
        return sum(layer.cell_bytes for layer in self.formats.values())

    @property
    def elements(self) -> int:
        """K and V channels of one token over all layers."""
        return sum(layer.elements for layer in self.formats.values())

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token in 16 bits: K and V of all layers."""
        return self.elements * self.window_dtype.itemsize

    @property
    def group_sizes(self) -> list[int]:
        """Channels that share a scale, over all layers, ascending; none of sides left exact or with a codebook."""
        sides = [side for part in parts_of(self.formats.values()) for _, side in part.sides]
        return sorted({side.group_size for side in sides if side.bits != EXACT and side.codebook is None})

    @property
    def ring_bytes(self) -> int:
        """Bytes of one request's recent ring."""
        return self.windows.ring * self.full_token_bytes

    @property
    def sink_bytes(self) -> int:
        """Bytes of one sink block."""
        return self.windows.sink * self.full_token_bytes

    def bits_per_element(self, tokens: int) -> float:
        """Effective bits per KV element of one request of ``tokens`` tokens, its windows included."""
        return 8 * (tokens * self.cell_bytes + self.ring_bytes + self.sink_bytes) / (tokens * self.elements)


def row_layouts(args: Any, settings: Settings, model: Any, kv_heads: int) -> tuple[RowLayout, RowLayout]:
    """Row geometry of keys and of values from flags and model. A side that is left exact has the model's 16-bit dtype,
    or that of the windows where the model computes in float32.

    Raises:
        Int2Error: --kv-cache-quant-group-size does not fit the heads of the model.
    """
    exact = model.dtype if model.dtype in EXACT_DTYPES else settings.window_torch_dtype

    def of_side(head_dim: int) -> RowLayout:
        asked = getattr(args, GROUP_SIZE)
        group_size = largest_group(head_dim, DEFAULT_GROUP_SIZE) if asked is None else asked
        try:
            return RowLayout(kv_heads, head_dim, group_size, settings.scale_torch_dtype, exact_dtype=exact)
        except ValueError as error:
            raise Int2Error(f"--kv-cache-quant-group-size {group_size}: {error}") from None

    return of_side(model.head_dim), of_side(model.v_head_dim)


def with_room(windows: Windows, tokens: int) -> Windows:
    """Windows whose ring holds ``tokens`` new tokens beside the recent window, of which some may be rejected.

    A rejected token stays in the ring until the next step overwrites it, so nothing that is read may have been in its
    place: ``recent + tokens`` rows do.

    >>> with_room(Windows(sink=64, recent=256, ring=256), 4).ring
    264
    >>> with_room(Windows(sink=64, recent=256, ring=256), 0).ring
    256
    """
    if tokens == 0:
        return windows
    ring = -(-(windows.recent + tokens) // RING_STEP) * RING_STEP
    return Windows(sink=windows.sink, recent=windows.recent, ring=ring, max_splits=windows.max_splits)


def own_heads(model: Any) -> slice:
    """The kv heads of a model that this tensor-parallel rank keeps.

    Args:
        model: SGLang's ModelConfig.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Fewer kv heads than ranks: neighbouring ranks keep the same one.
    first = parallel.attn_tp_rank * model.get_total_num_kv_heads() // parallel.attn_tp_size
    return slice(first, first + model.get_num_kv_heads(parallel.attn_tp_size))
