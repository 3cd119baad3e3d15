"""``focus`` with any codes of keys and of values, the same for all kv heads or each where it saves most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from accuracy.book_refinement import refined
from accuracy.calibration import Calibration
from accuracy.codebooks import in_float8
from accuracy.codes import Code, Read, Rows, books_of, scalar
from accuracy.methods.focus import ServedFocus
from accuracy.methods.vector_keys import weighted_keys
from accuracy.quantizers import SIXTEEN
from oscar_rotation.dump import DumpChunk
from oscar_rotation.fit.held_out import HELD_OUT_TOKENS, Request, moved, requests
from oscar_rotation.fit.samples import plan_samples
from oscar_rotation.math.attention_weights import attention_kl, output_error
from oscar_rotation.math.bit_plan import spend
from oscar_rotation.math.group_books import GroupBooks

SHARE = 0.5
"""Of attention in what a key counts when points are placed."""


@dataclass
class Combined(ServedFocus):
    """Transforms of ``focus``, and codes. Not served.

    Attributes:
        key_codes, value_codes: what kv heads may have, by bits, fewest first.
        key_mean, value_mean: bits of indexes, zero points too, that they may have on average; of no meaning with one
            code. Keys are given what lowers the sum of the attention's KL most, values that of the output's error,
            relative to a layer's output.
        chosen: by layer and kv head the number of the code, keys and values; set by fit.
    """

    key_codes: tuple[Code, ...] = (Code(256),)
    value_codes: tuple[Code, ...] = (Code(256, book="normal"),)
    key_mean: float = 0.0
    value_mean: float = 0.0
    group: int = 128
    table: str = "combinations"
    source: str = "this project; fours of channels as in NOVA-KV (arXiv 2608.04074)"

    def __post_init__(self) -> None:
        self.name = f"focus, {self.label}"
        self.chosen: list[torch.Tensor] = []

    def fit(self, calibration: Calibration) -> None:
        """Transforms, books of all codes, and which kv head has which."""
        super().fit(calibration)
        self.chosen, self.facts = [], {}
        self.reads: list[list[list[tuple[torch.Tensor, Read]]]] = []
        sides = ((self.key_codes, self.key_mean, True), (self.value_codes, self.value_mean, False))
        for codes, mean, keys in sides:
            books = [self._books(calibration, code, keys) for code in codes]
            layers = range(len(calibration.layers))
            chosen = torch.zeros(len(layers), calibration.kv_heads, dtype=torch.int64)
            if len(codes) > 1:
                losses = torch.stack([self._losses(calibration, n, codes, [b[n] for b in books], keys) for n in layers])
                chosen = allocated(losses.flatten(0, 1), codes, mean, calibration.head_dim).view_as(chosen)
            self.chosen.append(chosen)
            counts = torch.bincount(chosen.flatten(), minlength=len(codes)).tolist()
            self.facts |= {"keys" if keys else "values": {str(c): n for c, n in zip(codes, counts, strict=True)}}
            self.reads.append([self._reads(chosen[n], codes, [b[n] for b in books], keys) for n in layers])

    def _books(self, calibration: Calibration, code: Code, keys: bool) -> Sequence[GroupBooks | None]:
        """Books of a code in all layers, points in e4m3."""

        def fit() -> Sequence[GroupBooks | None]:
            layers = len(calibration.layers)
            found = books_of(code, layers, partial(self._key_rows if keys else self._value_rows, calibration))
            if code.refined:
                found = [self._refined(calibration, n, found[n], code) for n in range(layers)]
            return [book and in_float8(book, torch.float8_e4m3fn) for book in found]

        return calibration.once(("books", self.context, code, keys), fit)  # type: ignore[no-any-return]

    def _key_rows(self, calibration: Calibration, layer: int) -> Rows:
        keys, weights = weighted_keys(calibration, layer, SHARE, calibration.positions(self.context))
        return self.key.into(layer, keys[None])[0], weights

    def _value_rows(self, calibration: Calibration, layer: int) -> Rows:
        y = self.value.into(layer, calibration.layers[layer].v.transpose(0, 1)[None])[0]
        return y, torch.ones_like(y[..., 0])

    def _refined(self, calibration: Calibration, layer: int, books: GroupBooks | None, code: Code) -> GroupBooks:
        assert books is not None
        fitted, held_out = split_requests(calibration, layer, self.context)
        into, out = partial(self.key.into, layer), partial(self.key.out, layer)
        return refined(books, fitted, held_out, into, out, code.key_gain)

    def _losses(
        self,
        calibration: Calibration,
        layer: int,
        codes: Sequence[Code],
        books: Sequence[GroupBooks | None],
        keys: bool,
    ) -> torch.Tensor:
        """What every kv head loses with every code, on requests that the transforms have not seen: [heads, codes]."""
        held_out = split_requests(calibration, layer, self.context)[1]
        scale, reader = calibration.head_dim**-0.5, calibration.readers[layer]
        found = []
        for code, book in zip(codes, books, strict=True):
            read, losses = code.reader(book, keys), []
            for r in held_out:
                if keys:
                    coded = self._through(layer, r.k, read, True)
                    losses.append(attention_kl(r.q, r.k, coded, scale, sinks=r.sinks))
                    continue
                wrong = self._through(layer, r.v, read, False) - r.v
                whole, lost = (output_error(r.q, r.k, x, scale, reader, sinks=r.sinks) for x in (r.v, wrong))
                losses.append(lost / whole.sum())
            found.append(torch.stack(losses).mean(0))
        return torch.stack(found, 1).cpu()

    def _through(self, layer: int, x: torch.Tensor, read: Read, keys: bool) -> torch.Tensor:
        side = self.key if keys else self.value
        return side.out(layer, read(side.into(layer, x[None])))[0]

    def _reads(
        self, chosen: torch.Tensor, codes: Sequence[Code], books: Sequence[GroupBooks | None], keys: bool
    ) -> list[tuple[torch.Tensor, Read]]:
        """Of one layer: kv heads that have a code, and what reads their rows."""
        found = []
        for number in chosen.unique().tolist():
            heads, book = (chosen == number).nonzero()[:, 0].to(self.key.forward.device), books[number]
            part = book and GroupBooks(book.points[heads])
            found.append((heads, codes[number].reader(part, keys)))
        return found

    def _read(self, layer: int, y: torch.Tensor, keys: bool) -> torch.Tensor:
        parts = self.reads[0 if keys else 1][layer]
        if len(parts) == 1:
            return parts[0][1](y)
        out = torch.empty_like(y)
        for heads, read in parts:
            out[:, heads] = read(y[:, heads])
        return out

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        return self.key.out(layer, self._read(layer, self.key.into(layer, k), True))

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        return self.value.out(layer, self._read(layer, self.value.into(layer, v), False))

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Mean over kv heads; before the fit, of several codes, what they may have."""
        sides = ((self.key_codes, self.key_mean), (self.value_codes, self.value_mean))
        found = [codes[0].bits(head_dim) if len(codes) == 1 else mean + SIXTEEN / head_dim for codes, mean in sides]
        for side, (codes, _) in enumerate(sides):
            if self.chosen:
                heads = self.chosen[side].flatten().tolist()
                found[side] = sum(codes[n].bits(head_dim) for n in heads) / len(heads)
        return found[0], found[1]


def split_requests(calibration: Calibration, layer: int, context: int | None) -> tuple[list[Request], list[Request]]:
    """Requests that the transforms of ``focus`` were fitted to, and those held out, both spread over a context."""
    x = calibration.layers[layer]
    chunk = DumpChunk(x.q, x.k, x.v, tuple(calibration.seq_lens))
    first, sinks = plan_samples({0: chunk.seq_lens}, HELD_OUT_TOKENS)[0], calibration.sink_logits(layer)
    positions = calibration.positions(context)
    fitted, later = (moved(list(requests(part, sinks)), positions) for part in chunk.split(first))
    return fitted, later


def allocated(losses: torch.Tensor, codes: Sequence[Code], mean: float, head_dim: int) -> torch.Tensor:
    """The number of the code of every kv head with the least sum of losses.

    Args:
        losses: [heads, codes].
        codes: by bits, fewest first.
        mean: bits of indexes, zero points too, on average at most.
        head_dim: channels of a head.

    Returns:
        int64 [heads].

    Raises:
        ValueError: the mean is below the first code, or codes are not in order.
    """
    widths = [round((code.bits(head_dim) * head_dim) - SIXTEEN) for code in codes]
    if widths != sorted(set(widths)):
        raise ValueError("codes must be in the order of their bits, no two with the same")
    taken = spend(losses, widths, int(mean * head_dim * len(losses) + 1e-6))
    return torch.tensor([widths.index(width) for width in taken])


def row(label: str, keys: Code | Sequence[Code] = (), values: Code | Sequence[Code] = (), **means: float) -> partial:
    """One row; fours of 256 points where nothing is said, fitted for keys and normal for values."""
    given = {"key_codes": keys, "value_codes": values}
    codes = {name: (x,) if isinstance(x, Code) else tuple(x) for name, x in given.items() if x}
    return partial(Combined, label=label, **codes, **means)  # type: ignore[arg-type]


NORMAL, LEVELS = Code(256, book="normal"), Code(4, 1, "normal")
TWELVE = Code(4096, book="head")
BY_HEAD = (Code(64), Code(256), Code(1024), TWELVE)
LOW = (Code(16), *BY_HEAD[:3])
VALUES_BY_HEAD = tuple(Code(n, book="normal") for n in (64, 256, 1024))
LOW_VALUES = (Code(16, book="normal"), *VALUES_BY_HEAD)

METHODS = [
    # 2.16 bits: both sides of two bits without a zero point.
    row("keys in fours, values in fours"),
    row("keys in fours, values of 4 levels", values=LEVELS),
    row("keys in fours by head (64 to 4,096 points), values in fours", BY_HEAD, key_mean=2.0),
    row("keys and values in fours by head", BY_HEAD, VALUES_BY_HEAD, key_mean=2.0, value_mean=2.0),
    row("keys in fours refined on attention, values in fours", Code(256, refined=True)),
    # 2.28 bits: a bit more where it saves most.
    row("keys in fours, of 12 bits in 25% of kv heads", (Code(256), TWELVE), key_mean=2.25),
    row("keys in fours, K3 in some kv heads", (Code(256), scalar(3)), key_mean=2.25),
    row("keys in fours by head, 2.25", BY_HEAD, key_mean=2.25),
    row("keys and values in fours by head, 2.25 and 2", BY_HEAD, VALUES_BY_HEAD, key_mean=2.25, value_mean=2.0),
    # 2.16 bits again: smaller books, less calibration.
    row("keys in pairs, values of 4 levels", Code(16, 2), LEVELS),
    row("keys in fours, one book a head", Code(256, book="head")),
    row("keys in fours, one book for the kv heads of a place", Code(256, book="place")),
    row("keys in fours, one book a layer", Code(256, book="layer")),
    row("keys in fours, one book a layer, a factor for each place", Code(256, book="scaled")),
    row("keys in fours, one book a model", Code(256, book="model")),
    row("keys in fours, a quarter of the calibration", Code(256, part=0.25)),
    row("keys in fours, values in fitted fours", values=Code(256)),
    # 2.22 bits, as the row of fours with values that have zero points.
    row("keys in fours, one book a head with an offset a row", Code(256, book="head", offset=True)),
    # 2.4 and 2.5 bits.
    row("keys in fours of 1,024 points", Code(1024)),
    row("keys in fours by head, 2.5", BY_HEAD, key_mean=2.5),
    row("keys in fours, of 12 bits in 75% of kv heads", (Code(256), TWELVE), key_mean=2.75),
    row("keys in fours by head, 2.75", BY_HEAD, key_mean=2.75),
    row("keys in fours of 12 bits", TWELVE),
    # Down to one bit.
    row("keys in fours of 64 points", Code(64)),
    row("values in fours of 64 points", values=VALUES_BY_HEAD[0]),
    row("keys and values in fours of 64 points", Code(64), VALUES_BY_HEAD[0]),
    row("keys and values in fours by head, 1.5", LOW, LOW_VALUES, key_mean=1.5, value_mean=1.5),
    row("keys and values in fours of 16 points", Code(16), LOW_VALUES[0]),
]
