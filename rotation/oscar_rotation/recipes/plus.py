"""The recipe ``plus``: key centers and balanced transforms (see :mod:`oscar_rotation.math.balanced`), fitted for every
position of the model's context (:mod:`oscar_rotation.math.positions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from oscar_kernels.layout import AFFINE, CODEBOOK
from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.dump.stream import stream_chunks
from oscar_rotation.errors import of_layer
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side
from oscar_rotation.fit.bit_goal import AUTO, BitGoal
from oscar_rotation.fit.bits import Measured, apply_goal
from oscar_rotation.fit.book_gains import fit_gains
from oscar_rotation.fit.books import fit_books
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.heads import check_heads
from oscar_rotation.fit.held_out import plan_held_out
from oscar_rotation.fit.layer import Progress
from oscar_rotation.fit.options import OptionError
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.result import FitResult, package_version, reach, remarks
from oscar_rotation.fit.side_codes import Row, SideCodes
from oscar_rotation.fit.texts import sequences
from oscar_rotation.math.balanced import COMPOSITION, Balanced, balance, shrunk
from oscar_rotation.math.covariance import KeyCovariance, QueryCovariance, ValueCovariance
from oscar_rotation.math.positions import Positions
from oscar_rotation.recipes.base import FitRequest, FittedRecipe, activations, output_weights

SINK = 64
"""First tokens of a request, which a server reads in 16 bits; at most half of a short request is left out for them."""

KEY_ROWS = {2: (0.88, 0.98), 3: (0.97, 0.995), 4: (1.0, 1.0)}
VALUE_ROWS = {bits: (clip, 1.0) for bits, (clip, _) in KEY_ROWS.items()}
"""Clip ratio, and gain of scales fitted to the codes, by bits of a code.

The ratios have the least squared error of fitted levels over a normal row, about. Noise in a logit makes exp(logit)
larger on average, by half its variance in nats, for every token that is read quantized; keys read a little short make
up for it. Values need no such thing."""

CLIP_RATIO, KEY_GAIN = KEY_ROWS[2]
VALUE_GAIN = VALUE_ROWS[2][1]
"""Of codes of two bits."""

OBJECTIVE = "balanced"


class Moments:
    """What the transforms of one layer are made of.

    Args:
        kv_heads, head_dim, device: as of :class:`oscar_rotation.math.covariance.CovarianceAccumulator`, of keys.
        value_head_dim: channels per head of the values.
    """

    def __init__(self, kv_heads: int, head_dim: int, value_head_dim: int, device: torch.device | str = "cpu") -> None:
        self.queries, self.keys = QueryCovariance(kv_heads, head_dim, device), KeyCovariance(kv_heads, head_dim, device)
        self.values = ValueCovariance(kv_heads, value_head_dim, device)
        self.key_sum = torch.zeros(kv_heads, head_dim, dtype=torch.float64, device=device)
        self.longest = 0

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add whole requests; shapes as of the covariance accumulators. Sink tokens count as queries only."""
        self.longest = max([self.longest, *seq_lens])
        self.queries.update(q, k, v, seq_lens)
        k, v = (behind_sink(x, seq_lens).to(self.key_sum.device) for x in (k, v))
        self.keys.update(q, k, v, seq_lens)
        self.values.update(q, k, v, seq_lens)
        self.key_sum += k.double().sum(0)

    def center(self, positions: Positions | None = None) -> torch.Tensor:
        """Mean key by kv head: float64 [kv_heads, head_dim] on the CPU; at all ``positions`` of a context."""
        mean = (self.key_sum / self.keys.rows).cpu()
        return positions.vector(mean, self.longest) if positions else mean

    def queries_by_head(self, positions: Positions | None = None) -> torch.Tensor:
        """Second moment of the queries: float64 [kv_heads, head_dim, head_dim] on the CPU."""
        moment = self.queries.per_head().cpu()
        return positions.moment(moment, self.longest) if positions else moment

    def keys_by_head(self, centered: bool = True, positions: Positions | None = None) -> torch.Tensor:
        """Second moment of the keys, less their centers: float64 [kv_heads, head_dim, head_dim] on the CPU."""
        moment, center = self.keys.per_head().cpu(), self.center(positions)
        moment = positions.moment(moment, self.longest) if positions else moment
        return moment - center[:, :, None] * center[:, None, :] if centered else moment


def behind_sink(x: torch.Tensor, seq_lens: Sequence[int]) -> torch.Tensor:
    """Tokens behind the sink of every request: [tokens, heads, d] -> [fewer, heads, d]."""
    return torch.cat([part[min(SINK, len(part) // 2) :] for part in x.split(list(seq_lens))])


@dataclass(frozen=True)
class PlusLayer:
    """Transforms of one layer; ``center`` float64 [kv_heads, head_dim] in the model's basis."""

    key: Balanced
    value: Balanced
    center: torch.Tensor


def fit_plus_layer(moments: Moments, reader: torch.Tensor, positions: Positions | None = None) -> PlusLayer:
    """Both transforms and the centers of one layer.

    Args:
        moments: of the layer.
        reader: W_o W_o^T by kv head, [kv_heads, d, d], d channels of a head of the values.
        positions: that keys may have; None for those that they had.
    """
    stored, reading = moments.keys_by_head(positions=positions), moments.queries_by_head(positions)
    key = balance(shrunk(stored.mean(0)), shrunk(reading.mean(0)))
    value = balance(moments.values.shared(), reader.mean(0))
    return PlusLayer(key, value, moments.center(positions))


def fit_plus(
    dump: DumpReader | str | Path,
    weights: OutputWeights,
    *,
    context: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    held: Mapping[int, int] | None = None,
) -> FitResult:
    """Fit the recipe ``plus`` to a dump of activations.

    Args:
        dump: reader of a dump, or its folder.
        weights: output projections of the model that was dumped.
        context: positions that keys may have; None for the model's, 0 for those of the dump alone.
        device: "auto", "cpu", "cuda" or another torch device.
        progress: told about every chunk.
        held: requests that are left out, chunk -> the first of them.

    Raises:
        DumpError: the dump or the weights are broken, do not fit each other or do not suffice.
        ValueError: unknown device.
    """
    place = choose_device(device)
    source = dump if isinstance(dump, DumpReader) else DumpReader(dump)
    chunks = source.fit_chunks()
    stream = stream_chunks(source, [(layer, chunk) for layer in range(source.num_layers) for chunk in chunks], place)
    layers: list[PlusLayer] = []
    positions: Positions | None = None
    tokens = requests = q_heads = kv_heads = head_dim = value_head_dim = longest = 0
    for layer in range(source.num_layers):
        moments: Moments | None = None
        for index, whole in enumerate(islice(stream, len(chunks))):
            chunk, _ = whole.split((held or {}).get(chunks[index], len(whole.seq_lens)))
            q_heads, kv_heads, head_dim = chunk.q.shape[1], chunk.k.shape[1], chunk.k.shape[2]
            value_head_dim = chunk.v.shape[2]
            if moments is None:
                check_heads(source.root, head_dim, value_head_dim)
                moments = Moments(kv_heads, head_dim, value_head_dim, place)
            if not layers and index == 0:
                positions = weights.positions(head_dim, context)
            if chunk.seq_lens:
                moments.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
            if layer == 0:
                tokens, requests = tokens + sum(chunk.seq_lens), requests + len(chunk.seq_lens)
            if progress is not None:
                progress(layer * len(chunks) + index + 1, source.num_layers * len(chunks))
        assert moments is not None
        longest = moments.longest
        reader = weights.reader(layer, kv_heads, value_head_dim)
        with of_layer(layer):
            layers.append(fit_plus_layer(moments, reader, positions))
    calibration = {
        "tokens": tokens, "requests": requests, "chunks": len(chunks), "include_warmup": False,
        "q_heads": q_heads, "kv_heads": kv_heads, **reach(positions, longest),
    }  # fmt: skip
    model = (source.manifest.model_id, source.manifest.model_hash) if source.manifest else ("", "")

    def metadata(side: Side) -> RotationMetadata:
        return RotationMetadata(
            OBJECTIVE, side, COMPOSITION, "descending", *model, package_version(), RECIPE.name, calibration
        )

    return FitResult(*pack_plus(layers, metadata("k"), metadata("v")), remarks(tokens, head_dim, positions, context))


def pack_plus(
    layers: Sequence[PlusLayer], key_metadata: RotationMetadata, value_metadata: RotationMetadata
) -> tuple[RotationSet, RotationSet]:
    """Both sides of all layers as files hold them."""
    centers = torch.stack([layer.center @ layer.key.transform for layer in layers]).float()
    return (
        pack_side([layer.key for layer in layers], key_metadata, KEY_ROWS[2], centers),
        pack_side([layer.value for layer in layers], value_metadata, VALUE_ROWS[2], None),
    )


def pack_side(
    sides: Sequence[Balanced], metadata: RotationMetadata, row: Row, centers: torch.Tensor | None
) -> RotationSet:
    """One side of all layers as a file holds it.

    Args:
        sides: by layer.
        metadata: of the file.
        row: clip ratio and gain.
        centers: [layers, kv_heads, head_dim], behind the transforms; None for none.
    """
    return RotationSet(
        torch.stack([side.transform for side in sides]).float(),
        torch.stack([side.sigma for side in sides]).float(),
        (row[0],) * len(sides),
        metadata,
        torch.stack([side.dual for side in sides]).float(),
        centers,
        (row[1],) * len(sides),
    )


def _fit_request(request: FitRequest) -> FitResult:
    dump = activations(request, RECIPE.name)
    weights = output_weights(request, dump, RECIPE.name)
    held, ids = held_for_bits(request, dump), text_for_bits(request, weights)
    context = request.options.context
    result = fit_plus(dump, weights, context=context, device=request.device, progress=request.progress, held=held)
    return spend_bits(request, result, dump, weights, held, ids)


def text_for_bits(request: FitRequest, weights: OutputWeights) -> torch.Tensor | None:
    """Tokens that the model says losses on; None where no text is given.

    Raises:
        DumpError: too little text, or no tokenizer.
    """
    documents = request.options.text
    return None if documents is None else sequences(documents, weights.folder)


def held_for_bits(request: FitRequest, dump: DumpReader) -> dict[int, int]:
    """Requests that a mean of bits is spent on, chunk -> the first of them; none where no mean is asked for.

    Raises:
        DumpError: a mean is asked for, and the dump holds one request.
    """
    goal = request.options.bits
    return plan_held_out(dump, dump.fit_chunks(), "a mean of --bits") if goal and goal.mean else {}


def spend_bits(
    request: FitRequest,
    result: FitResult,
    dump: DumpReader,
    weights: OutputWeights,
    held: Mapping[int, int],
    ids: torch.Tensor | None,
) -> FitResult:
    """A fit of two bits with the widths and codings that a request asks for; see
    :func:`oscar_rotation.fit.bits.apply_goal`.

    Raises:
        DumpError: the dump is broken, or the model cannot be asked.
        OptionError: the mean that is asked for is out of reach.
    """
    options, head_dim = request.options, result.key.head_dim
    if options.bits is None and options.codings == (AFFINE, AFFINE):
        return result
    goal, device = options.bits or BitGoal(2, 2), choose_device(request.device)
    try:
        if goal.mean is not None:
            if result.value.head_dim != head_dim:
                raise OptionError("bits", "must be widths such as k3v2 where heads of keys and values differ in size")
            goal.widths(head_dim, options.group_size, options.codings)  # refuses before anything is measured
        keys, values = SideCodes(KEY_ROWS), SideCodes(VALUE_ROWS, options.value_coding)
        if options.key_coding in (CODEBOOK, AUTO):
            held = plan_held_out(dump, dump.fit_chunks(), "a codebook")
            positions = weights.positions(head_dim, options.context)
            books = fit_books(dump, result.key, positions, device, held, request.progress)
            gains = fit_gains(dump, result.key, books, weights, held, positions, device)
            keys = SideCodes(KEY_ROWS, CODEBOOK, books, gains)
        on = Measured(dump, weights, held, options.context, device, ids)
        return apply_goal(goal, result, (keys, values), on, options.codings, options.group_size, request.progress)
    except DumpError:
        raise
    except ValueError as error:
        raise OptionError("bits", str(error)) from None


OPTIONS = frozenset({"context", "overrides", "bits", "group_size", "text", "key_coding", "value_coding"})
"""What this recipe and those built on it read."""

RECIPE = FittedRecipe(
    name="plus",
    summary="centered keys, balanced transforms, scales fitted to the codes",
    fit=_fit_request,
    options=OPTIONS,
    needs_activations=True,
    needs_weights=True,
    suffixes=(".safetensors",),
    names=lambda options, side: (OBJECTIVE, COMPOSITION),
)
