"""Keys as codes of four channels: an index into 256 points that calibration placed, for each kv head and group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.codebooks import gaussian_fours, in_float8, read_rows
from accuracy.methods.base import RowMethod
from accuracy.methods.focus import ServedFocus
from accuracy.quantizers import SIXTEEN
from oscar_rotation.dump import DumpChunk
from oscar_rotation.fit import books as served
from oscar_rotation.fit.held_out import requests
from oscar_rotation.math.group_books import GroupBooks, fitted_books, rms
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rotary_center import turned

CHANNELS, POINTS, ROUNDS = 4, 256, 20
"""Of a group, of a book, and of Lloyd's algorithm."""


class VectorKeys(RowMethod):
    """Keys behind the transform of a method that stands behind this class among the bases, as indices of
    :data:`CHANNELS` channels each, with one scale a token in bfloat16. Values are that method's.

    Attributes:
        float8: what holds the points of a book; None for float32.
        books: by layer; set by :meth:`fit_books`.
    """

    float8: torch.dtype | None = torch.float8_e4m3fn
    books: list[GroupBooks]

    def fit_books(self, calibration: Calibration, share: float, context: int | None, by_energy: bool) -> None:
        """Books of all layers, from keys behind the sink that the transform, already fitted, maps.

        Args:
            calibration: activations.
            share: of attention in the weights of keys, 0 to 1.
            context: positions that keys are turned to; None for the model's, 0 for those that they have.
            by_energy: whether the error of a key counts as it is, not relative to its length.
        """
        positions = calibration.positions(context)
        self.books = []
        for layer in range(len(calibration.layers)):
            keys, weights = weighted_keys(calibration, layer, share, positions)
            y = self.key.into(layer, keys[None])[0]
            size = rms(y)
            if by_energy:
                weights = weights * size[..., 0].square()
            books = fitted_books(y / size, weights, CHANNELS, POINTS, ROUNDS, layer)
            self.books.append(in_float8(books, self.float8) if self.float8 else books)

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        return self.key.out(layer, read_rows(self.key.into(layer, k), self.books[layer], self.k_gain))

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Indices and a scale a token; books are the same for all tokens."""
        return 8 / CHANNELS + SIXTEEN / head_dim, super().stored_bits(head_dim)[1]


def weighted_keys(
    calibration: Calibration, layer: int, share: float, positions: Positions | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration keys of a layer, each at a place of its own in a context, and what they count.

    Args:
        calibration: activations.
        layer: which one.
        share: of attention in the weights; the rest is the same for all keys.
        positions: of the context; None leaves keys where they are.

    Returns:
        float32 [kv_heads, tokens, d] and [kv_heads, tokens]; tokens of the sink weigh nothing.
    """
    x = calibration.layers[layer]
    found = list(requests(DumpChunk(x.q, x.k, x.v, tuple(calibration.seq_lens)), calibration.sink_logits(layer)))
    scale = calibration.head_dim**-0.5
    keys = torch.cat([r.k for r in found], 1)
    weights = calibration.once((layer, "key weights", share), lambda: served.weighted_keys(found, scale, share)[1])
    if positions is not None:
        tables = calibration.once(
            ("key places", positions.context),
            lambda: served.places(positions, max(calibration.seq_lens), sum(calibration.seq_lens)),
        )
        keys = turned(keys, *(table.to(calibration.device) for table in tables))
    return keys, weights


@dataclass
class FocusFours(VectorKeys, ServedFocus):
    """``focus`` with fitted fours of keys. Not served.

    Attributes:
        share: of attention in what a key counts when points are placed.
        by_energy: whether the error of a key counts as it is then, not relative to its length.
        normal_values: values as fours, too: 256 points for a normal distribution, the same book everywhere, no zero
            point.
    """

    share: float = 0.5
    by_energy: bool = True
    normal_values: bool = False
    source: str = "this project; fours of channels as in NOVA-KV (arXiv 2608.04074)"

    def fit(self, calibration: Calibration) -> None:
        """Transforms of ``focus``, then the books."""
        super().fit(calibration)
        self.fit_books(calibration, self.share, self.context, self.by_energy)
        self.normal = gaussian_fours(POINTS).to(calibration.device)

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        if not self.normal_values:
            return super().values(layer, v)
        y = self.value.into(layer, v)
        books = GroupBooks(self.normal.expand(y.shape[1], y.shape[-1] // CHANNELS, -1, -1))
        return self.value.out(layer, read_rows(y, books, self.v_gain))

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`accuracy.methods.base.Method`."""
        keys, values = super().stored_bits(head_dim)
        return keys, keys if self.normal_values else values


def fours(label: str = "", **changes: object) -> Callable[[], FocusFours]:
    """One row."""
    text = "keys as fitted fours" + (f", {label}" if label else "")
    return partial(FocusFours, group=128, label=text, table="codebooks", **changes)  # type: ignore[arg-type]


METHODS = [
    fours(),
    fours("by relative error", by_energy=False),
    fours("values as normal fours", normal_values=True),
]
