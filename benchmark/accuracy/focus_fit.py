"""The wider form of the recipe ``focus``, which the laboratory measures: centers may turn with the position.

Servers take :mod:`oscar_rotation.recipes.focus`, with constant centers and the values of ``plus``.

``plus`` balances the second moment of all keys against that of all queries. Most keys are hardly read by anybody, and
those that are look unlike the rest: the moments of what is read are what an error counts by
(:mod:`oscar_rotation.math.attention_weights`). Keys lose a center that may turn with their position
(:mod:`oscar_rotation.math.rotary_center`), every kv head has transforms of its own, and what there is to choose is
chosen on calibration requests that the moments have not seen: by the KL of attention for keys, by the error behind the
output projection for values.

Given a transform T, the noise of key j is about white with the energy of its row, b_j = |(k_j - c_j) T|^2, and query i
sees an error of one unit with a_i = |q_i T^-T|^2. What is lost is the sum of u_ij a_i b_j, and for fixed a and b on
the other side the best M = T T^T is again a geometric mean, of the moments of keys with weights sum_i u_ij a_i and of
queries with weights sum_j u_ij b_j. A round of :attr:`FocusOptions.rounds` takes both from the transform of the round
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from accuracy.focus_side import FocusLayer, FocusOptions, FocusSide, Request
from oscar_rotation.math.attention_weights import Sensitivity, attention_kl, mixed, output_error, sensitivity
from oscar_rotation.math.balanced import SHRINKAGE, balance, shrunk
from oscar_rotation.math.rotary_center import RotaryCenter, fit_center
from oscar_rotation.recipes.plus import VALUE_GAIN


def split(requests: Sequence[Request], held_out: float) -> tuple[Sequence[Request], Sequence[Request]]:
    """Requests to fit on and, from the end, requests to choose on; one of each at least.

    Raises:
        ValueError: fewer than two requests.
    """
    if len(requests) < 2:
        raise ValueError(f"the recipe focus needs two calibration requests or more, got {len(requests)}")
    count = min(len(requests) - 1, max(1, round(held_out * len(requests))))
    return requests[:-count], requests[-count:]


def moment(xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted second moment by head: float64 [heads, d, d] of xs [heads, n, ..., d] and weights [heads, n, ...]."""
    heads, d = xs[0].shape[0], xs[0].shape[-1]
    total = torch.zeros(heads, d, d, dtype=torch.float64, device=xs[0].device)
    for x, w in zip(xs, weights, strict=True):
        flat, heavy = x.flatten(1, -2), w.flatten(1)[..., None]
        total += (flat.mT @ (flat * heavy)).double()
    return total / torch.stack([w.flatten(1).sum(1) for w in weights]).sum(0).double().clamp_min(1e-30)[:, None, None]


def balanced_heads(
    stored: torch.Tensor, reading: torch.Tensor, per_head: bool, shrinkage: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """T and T^-1 by head from both moments [heads, d, d]; the same for all heads unless ``per_head``: float32."""
    device, heads = stored.device, stored.shape[0]
    stored, reading = stored.cpu(), reading.cpu().double()
    if not per_head:
        stored, reading = stored.mean(0, keepdim=True), reading.mean(0, keepdim=True)
    stored, reading = shrunk(stored, shrinkage), shrunk(reading, shrinkage)
    found = [balance(a, b) for a, b in zip(stored, reading, strict=True)]
    pairs = (torch.stack([x.transform for x in found]), torch.stack([x.dual.mT for x in found]))
    forward, back = (x.float().expand(heads, -1, -1).contiguous().to(device) for x in pairs)
    return forward, back


def best(sides: Sequence[FocusSide], per_head: bool) -> FocusSide:
    """The side with the least loss, head by head where every head may have its own."""
    losses = torch.stack([side.loss for side in sides])
    index = losses.argmin(0) if per_head else losses.sum(1).argmin().expand(losses.shape[1])
    heads = range(losses.shape[1])

    def pick(of: Callable[[FocusSide], torch.Tensor]) -> torch.Tensor:
        return torch.stack([of(sides[int(index[h])])[h] for h in heads])

    return FocusSide(
        pick(lambda s: s.transform),
        pick(lambda s: s.back),
        RotaryCenter(pick(lambda s: s.center.constant), pick(lambda s: s.center.turning)),
        sides[0].clip,
        sides[0].gain,
        pick(lambda s: s.loss),
        tuple(sides[int(index[h])].chosen[h] for h in heads),
    )


class FocusFit:
    """The fit of one layer.

    Args:
        requests: calibration, in memory for this layer alone.
        scale: factor on the logits.
        reader: W_o W_o^T by kv head, [heads, d, d].
        options: what is tried.
        known: sensitivities of the requests without a transform, where they are known from another fit.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        scale: float,
        reader: torch.Tensor,
        options: FocusOptions,
        known: Sequence[Sensitivity] | None = None,
    ) -> None:
        self.scale, self.reader, self.options = scale, reader, options
        self.fitted, self.held = split(requests, options.held_out)
        found = [sensitivity(r.q, r.k, scale) for r in self.fitted] if known is None else known
        self.plain = list(found)[: len(self.fitted)]

    def layer(self) -> FocusLayer:
        """Both sides."""
        return FocusLayer(self.keys(), self.values())

    def keys(self) -> FocusSide:
        """Transforms and centers by held-out attention KL, then clip ratio and gain."""
        options = self.options
        side = best(list(self._key_candidates()), options.per_head)
        trials = [
            self._key_loss(replace(side, clip=clip, gain=gain)) for clip in options.clips for gain in options.gains
        ]
        return min(trials, key=lambda trial: float(trial.loss.sum()))

    def _key_candidates(self) -> Iterator[FocusSide]:
        options = self.options
        keys = [r.k for r in self.fitted]
        tables = [r.tables for r in self.fitted]
        for turning in options.turning:
            for share in options.shares:
                for query_share in options.query_shares:
                    found = self.plain
                    for number in range(1 + (options.rounds if share else 0)):
                        weights = mixed([s.keys for s in found], share)
                        center = fit_center(keys, weights, tables, turning)
                        rows = [r.k - center.at(*r.tables) for r in self.fitted]
                        readings = mixed([s.queries for s in found], query_share, sink=0)
                        forward, back = balanced_heads(
                            moment(rows, weights),
                            moment([r.q for r in self.fitted], readings),
                            options.per_head,
                            SHRINKAGE,
                        )
                        label = f"share {share}, queries {query_share}, turning {turning}, round {number}"
                        side = self._side(forward, back, center, label)
                        yield self._key_loss(side)
                        if share and number < options.rounds:
                            found = self._again(side)

    def _side(self, forward: torch.Tensor, back: torch.Tensor, center: RotaryCenter, label: str) -> FocusSide:
        clip, gain = self.options.clips[0], self.options.gains[0]
        return FocusSide(forward, back, center, clip, gain, torch.zeros(len(back)), (label,) * len(back))

    def _again(self, side: FocusSide) -> list[Sensitivity]:
        """Sensitivities with the errors that a transform makes."""
        found = []
        for r in self.fitted:
            reading = (r.q.flatten(1, 2) @ side.back.mT).square().sum(-1).view(r.q.shape[:3])
            stored = side.into(r.k, r.tables).square().sum(-1)
            found.append(sensitivity(r.q, r.k, self.scale, reading / reading.mean(), stored / stored.mean()))
        return found

    def _key_loss(self, side: FocusSide) -> FocusSide:
        options = self.options
        losses = [
            attention_kl(r.q, r.k, side.read(r.k, r.tables, options.group, options.key_levels), self.scale)
            for r in self.held
        ]
        return replace(side, loss=torch.stack(losses).mean(0))

    def values(self) -> FocusSide:
        """Transforms by the held-out error behind the output projection, then the clip ratio."""
        options = self.options
        values = [r.v for r in self.fitted]
        tables = [r.tables for r in self.fitted]
        sides = []
        for share in options.value_shares:
            weights = mixed([s.values for s in self.plain], share)
            center = fit_center(values, weights, tables, False)
            if not options.value_centers:
                center = RotaryCenter(torch.zeros_like(center.constant), center.turning)
            rows = [r.v - center.at(*r.tables) for r in self.fitted]
            forward, back = balanced_heads(moment(rows, weights), self.reader, options.per_head, SHRINKAGE)
            side = self._side(forward, back, center, f"share {share}")
            sides.append(replace(side, clip=options.value_clips[0], gain=VALUE_GAIN))
        side = best([self._value_loss(x) for x in sides], options.per_head)
        trials = [self._value_loss(replace(side, clip=clip)) for clip in options.value_clips]
        return min(trials, key=lambda trial: float(trial.loss.sum()))

    def _value_loss(self, side: FocusSide) -> FocusSide:
        options = self.options
        losses = []
        for r in self.held:
            wrong = side.read(r.v, r.tables, options.group, options.value_levels) - r.v
            losses.append(output_error(r.q, r.k, wrong, self.scale, self.reader))
        return replace(side, loss=torch.stack(losses).mean(0))
