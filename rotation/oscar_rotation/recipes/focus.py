"""The recipe ``focus``: keys as in ``plus``, but weighed by the attention that they get, a transform per kv head.

``plus`` balances the second moment of all keys against that of all queries. Most keys are hardly read by anybody, and
those that are look unlike the rest. An error of a key counts by the attention it gets
(:mod:`oscar_rotation.math.attention_weights`), and so does the key here, in the center and in the second moment. How
much weighing helps differs from head to head: of several shares of it, each head takes the one with the least KL of
attention on requests that its moments have not seen. Queries count alike; positions, values, clip ratios and gains are
those of ``plus``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from oscar_rotation.dump import DumpChunk, DumpReader
from oscar_rotation.dump.stream import stream_chunks
from oscar_rotation.errors import of_layer
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.heads import check_heads
from oscar_rotation.fit.held_out import QUERIES, Request, moved, plan_held_out, requests
from oscar_rotation.fit.layer import Progress
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.result import FitResult, package_version, reach, remarks
from oscar_rotation.math.attention_weights import Exact, attention_kl, key_weights
from oscar_rotation.math.balanced import COMPOSITION, Balanced, balance, shrunk
from oscar_rotation.math.covariance import QueryCovariance, ValueCovariance
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.positions import Positions
from oscar_rotation.recipes import plus
from oscar_rotation.recipes.base import FitRequest, FittedRecipe, activations, output_weights
from oscar_rotation.threads import one_thread

SHARES = (0.0, 0.5, 0.9)
"""Of attention in the moments of keys; the rest counts every key alike. Each head takes one of them."""

GROUP = 64
"""Channels that share a scale while shares are chosen; files do not depend on it otherwise."""

OBJECTIVE = {"k": "focused", "v": plus.OBJECTIVE}
"""What files call their target; values are those of ``plus``."""


class FocusMoments:
    """What the key transforms of one layer are made of, and the second moment of its values.

    Args:
        kv_heads, head_dim, device: as of :class:`oscar_rotation.math.covariance.CovarianceAccumulator`, of keys.
        value_head_dim: channels per head of the values.
        scale: factor on the logits.
        sinks: [q_heads], sink logits of the layer; None for a layer without.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int,
        scale: float,
        device: torch.device | str = "cpu",
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.scale, self.sinks = scale, sinks
        self.queries = QueryCovariance(kv_heads, head_dim, device)
        self.values = ValueCovariance(kv_heads, value_head_dim, device)
        # Of keys with weights, then of all alike: energy [2, heads, d, d], sum [2, heads, d], mass [2, heads].
        self.energy = torch.zeros(2, kv_heads, head_dim, head_dim, dtype=torch.float64, device=device)
        self.sum = torch.zeros(2, kv_heads, head_dim, dtype=torch.float64, device=device)
        self.mass = torch.zeros(2, kv_heads, dtype=torch.float64, device=device)
        self.longest = 0

    def update_keys(self, chunk: DumpChunk) -> None:
        """Add whole requests that keys are fitted on."""
        self.longest = max([self.longest, *chunk.seq_lens])
        self.queries.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
        for request in requests(chunk, self.sinks):
            q, k = request.q, request.k
            n = k.shape[1]
            sink = min(plus.SINK, n // 2)
            weights = torch.stack([key_weights(q, k, self.scale, request.sinks), torch.ones_like(k[..., 0])])
            weights[:, :, :sink] = 0
            heavy = weights.double()[..., None] * k.double()
            self.energy += heavy.mT @ k.double()
            self.sum += heavy.sum(2)
            self.mass += weights.double().sum(-1)

    def update_values(self, chunk: DumpChunk) -> None:
        """Add whole requests whose values count: all of them."""
        k, v = (plus.behind_sink(x, chunk.seq_lens) for x in (chunk.k, chunk.v))
        self.values.update(chunk.q, k, v, chunk.seq_lens)

    def queries_by_head(self, positions: Positions | None = None) -> torch.Tensor:
        """Second moment of the queries, float64 [kv_heads, d, d] on the CPU; at all ``positions`` of a context."""
        moment = self.queries.per_head().cpu()
        return positions.moment(moment, self.longest) if positions else moment

    def keys(self, share: float, positions: Positions | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Second moment about the center, [kv_heads, d, d], and the center, [kv_heads, d]: float64 on the CPU.

        Args:
            share: of attention, 0 to 1; 0 gives the moments of ``plus`` by kv head. A head without any attention
                behind the windows has those in any case.
            positions: that keys may have; None for those that they had.
        """
        energy, total, mass = self.energy.cpu(), self.sum.cpu(), self.mass.cpu()
        seen = share * (mass[:1] > 0)
        parts = torch.cat([seen, 1 - seen]) / mass.clamp_min(torch.finfo(torch.float64).tiny)
        center = (total * parts[..., None]).sum(0)
        moment = (energy * parts[..., None, None]).sum(0)
        if positions:
            center, moment = positions.vector(center, self.longest), positions.moment(moment, self.longest)
        return moment - center[:, :, None] * center[:, None, :], center


@dataclass(frozen=True)
class FocusLayer:
    """Transforms of one layer.

    Attributes:
        keys: by kv head.
        value: of all kv heads.
        center: float64 [kv_heads, head_dim], in the model's basis.
        shares: by kv head, of :data:`SHARES`.
    """

    keys: tuple[Balanced, ...]
    value: Balanced
    center: torch.Tensor
    shares: tuple[float, ...]


def fit_focus_layer(
    moments: FocusMoments, held_out: Sequence[Request], reader: torch.Tensor, positions: Positions | None = None
) -> FocusLayer:
    """Transforms and centers of one layer.

    Args:
        moments: of the layer.
        held_out: requests that shares are chosen on.
        reader: W_o W_o^T by kv head, [kv_heads, d, d], d channels of a head of the values.
        positions: that keys may have; None for those that they had.
    """
    queries = shrunk(moments.queries_by_head(positions))
    held_out = moved(held_out, positions)
    found: list[tuple[list[Balanced], torch.Tensor]] = []
    losses = []
    for share in SHARES:
        stored, center = moments.keys(share, positions)
        with one_thread():
            keys = [balance(*pair) for pair in zip(shrunk(stored), queries, strict=True)]
        found.append((keys, center))
        losses.append(_loss(keys, center, held_out, moments.scale))
    chosen = torch.stack(losses).argmin(0).tolist()
    return FocusLayer(
        tuple(found[index][0][head] for head, index in enumerate(chosen)),
        balance(moments.values.shared(), reader.mean(0)),
        torch.stack([found[index][1][head] for head, index in enumerate(chosen)]),
        tuple(SHARES[index] for index in chosen),
    )


def _loss(keys: Sequence[Balanced], center: torch.Tensor, held_out: Sequence[Request], scale: float) -> torch.Tensor:
    """KL of attention by kv head, mean over the queries of all requests: [kv_heads] on the CPU."""
    total, count = torch.zeros(len(keys)), 0
    for request in held_out:
        q, k = request.q, request.k
        device = k.device
        into = torch.stack([key.transform for key in keys]).float().to(device)
        back = torch.stack([key.dual.mT for key in keys]).float().to(device)
        middle = center.float().to(device)[:, None]
        read = coded((k - middle) @ into, GROUP, *plus.KEY_ROWS[2]) @ back + middle
        n, exact = k.shape[1], Exact.of(k.shape[1])
        rows = n - max(n - QUERIES, min(exact.sink + exact.recent, n - 1))
        total, count = total + rows * attention_kl(q, k, read, scale, QUERIES, request.sinks).cpu(), count + rows
    return total / count


def fit_focus(
    dump: DumpReader | str | Path,
    weights: OutputWeights,
    *,
    context: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> FitResult:
    """Fit the recipe ``focus`` to a dump of activations.

    In memory are one chunk of one layer, the held-out requests of that layer, blocks of scores, and where a GPU fits,
    the chunks that are read ahead.

    Args:
        dump: reader of a dump, or its folder.
        weights: output projections of the model that was dumped.
        context: positions that keys may have; None for the model's, 0 for those of the dump alone.
        device: "auto", "cpu", "cuda" or another torch device.
        progress: told about every chunk.

    Raises:
        DumpError: the dump or the weights are broken, do not fit each other or do not suffice; one request does not.
        ValueError: unknown device.
    """
    place = choose_device(device)
    source = dump if isinstance(dump, DumpReader) else DumpReader(dump)
    chunks = source.fit_chunks()
    seq_lens = {chunk: source.seq_lens(0, chunk) for chunk in chunks}
    held = plan_held_out(source, chunks, f"the recipe {RECIPE.name}")
    stream = stream_chunks(source, [(layer, chunk) for layer in range(source.num_layers) for chunk in chunks], place)
    layers: list[FocusLayer] = []
    geometry, longest = (0, 0, 0), 0
    positions: Positions | None = None
    for layer in range(source.num_layers):
        moments: FocusMoments | None = None
        held_out: list[Request] = []
        sinks = source.sink_logits(layer)
        for index, chunk in enumerate(islice(stream, len(chunks))):
            geometry = (chunk.q.shape[1], *chunk.k.shape[1:])
            (kv_heads, head_dim), value_head_dim = geometry[1:], chunk.v.shape[2]
            if moments is None:
                check_heads(source.root, head_dim, value_head_dim)
                stated = source.manifest.sm_scale if source.manifest else None
                scale = stated or head_dim**-0.5
                moments = FocusMoments(kv_heads, head_dim, value_head_dim, scale, place, sinks)
            if not layers and index == 0:
                positions = weights.positions(head_dim, context)
            moments.update_values(chunk)
            fitted, later = chunk.split(held.get(chunks[index], len(chunk.seq_lens)))
            if fitted.seq_lens:
                moments.update_keys(fitted)
            held_out += requests(later, sinks)
            if progress is not None:
                progress(layer * len(chunks) + index + 1, source.num_layers * len(chunks))
        assert moments is not None
        longest = moments.longest
        reader = weights.reader(layer, kv_heads, value_head_dim)
        with of_layer(layer):
            layers.append(fit_focus_layer(moments, held_out, reader, positions))
    tokens = sum(map(sum, seq_lens.values()))
    calibration = {
        "tokens": tokens, "requests": sum(map(len, seq_lens.values())), "chunks": len(chunks), "include_warmup": False,
        "held_out_tokens": sum(sum(seq_lens[chunk][first:]) for chunk, first in held.items()),
        "q_heads": geometry[0], "kv_heads": geometry[1], **reach(positions, longest),
        "heads_by_share": {str(s): sum(layer.shares.count(s) for layer in layers) for s in SHARES},
    }  # fmt: skip
    model = (source.manifest.model_id, source.manifest.model_hash) if source.manifest else ("", "")

    def metadata(side: Side) -> RotationMetadata:
        return RotationMetadata(
            OBJECTIVE[side], side, COMPOSITION, "descending", *model, package_version(), RECIPE.name, calibration
        )

    return FitResult(
        *pack_focus(layers, metadata("k"), metadata("v")), remarks(tokens, geometry[2], positions, context)
    )


def pack_focus(
    layers: Sequence[FocusLayer], key_metadata: RotationMetadata, value_metadata: RotationMetadata
) -> tuple[RotationSet, RotationSet]:
    """Both sides of all layers as files hold them: keys per kv head, values per layer."""
    heads = [
        Balanced(
            *(
                torch.stack(parts)
                for parts in zip(*((key.transform, key.dual, key.sigma) for key in layer.keys), strict=True)
            )
        )
        for layer in layers
    ]
    centers = torch.stack(
        [(layer.center[:, None] @ key.transform)[:, 0] for layer, key in zip(layers, heads, strict=True)]
    )
    keys = plus.pack_side(heads, key_metadata, plus.KEY_ROWS[2], centers.float())
    return keys, plus.pack_side([layer.value for layer in layers], value_metadata, plus.VALUE_ROWS[2], None)


def _fit_request(request: FitRequest) -> FitResult:
    dump = activations(request, RECIPE.name)
    weights = output_weights(request, dump, RECIPE.name)
    context, device, ids = request.options.context, request.device, plus.text_for_bits(request, weights)
    result = fit_focus(dump, weights, context=context, device=device, progress=request.progress)
    return plus.spend_bits(request, result, dump, weights, plus.held_for_bits(request, dump), ids)


RECIPE = FittedRecipe(
    name="focus",
    summary="plus with keys weighed by the attention they get, and a key transform per kv head",
    fit=_fit_request,
    options=plus.OPTIONS,
    needs_activations=True,
    needs_weights=True,
    suffixes=(".safetensors",),
    names=lambda options, side: (OBJECTIVE[side], COMPOSITION),
)
