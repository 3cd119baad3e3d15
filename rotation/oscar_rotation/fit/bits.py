"""Bits of a code by layer and side, and by kv head of keys: the same everywhere, or as many as a budget allows, where
attention needs them.

What a layer loses is measured on requests that its transforms have not seen: the energy that errors of stored keys, and
of stored values, bring to the attention output behind the output projection, relative to the energy of that output.
Kv heads and layers add up. Given the losses the plan is the best one (:mod:`oscar_rotation.math.bit_plan`).

With text the model itself says what two bits of a side cost (:mod:`oscar_rotation.fit.model_losses`); more bits save of
it what they save of the error of the attention output. For SmolLM2 plans made so lose within 2% of what plans lose for
which the model measured every width, in a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oscar_kernels.layout import BITS, largest_group
from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.files.by_head import ByHead
from oscar_rotation.files.rotation_set import RotationMetadata
from oscar_rotation.fit.bit_goal import BitGoal, Codings, forms, mean_bits
from oscar_rotation.fit.held_out import QUERIES, Request, held_out_requests, moved
from oscar_rotation.fit.layer import Progress
from oscar_rotation.fit.model_losses import load_model, model_losses
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.result import FitResult
from oscar_rotation.fit.side_codes import Reading, SideCodes, reading, with_bits
from oscar_rotation.fit.texts import TAIL
from oscar_rotation.math.attention_weights import Exact, attention_of, scores_of
from oscar_rotation.math.positions import Positions
from oscar_rotation.threads import one_thread


def measure(
    request: Request,
    coded_keys: Sequence[torch.Tensor],
    coded_values: Sequence[torch.Tensor],
    scale: float,
    reader: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """What coding costs in one request.

    Args:
        request: as it was.
        coded_keys, coded_values: the same as a cache gives them back, one for each width.
        scale: factor on the logits.
        reader: W_o W_o^T by kv head, [kv_heads, head_dim, head_dim].

    Returns:
        energy of the errors behind the output projection by kv head, float64 [2, widths, kv_heads], keys first; energy
        of the output.
    """
    q, k, v = request.q, request.k, request.v
    n, exact = k.shape[1], Exact.of(k.shape[1])
    first = max(n - QUERIES, min(exact.sink + exact.recent, n - 1))
    positions, reader = torch.arange(n, device=k.device), reader.float().to(k.device)

    def energy(x: torch.Tensor) -> torch.Tensor:
        return ((x @ reader) * x).sum((1, 2), dtype=torch.float64).cpu()

    errors, whole = torch.zeros(2, len(coded_keys), len(k), dtype=torch.float64), 0.0
    blocks = [scores_of(q, keys, scale, first) for keys in (k, *coded_keys)]
    for (_, true, away), *others in zip(*blocks, strict=True):
        stop = true.shape[-1]
        read = ((away >= exact.recent) & (positions[:stop] >= exact.sink))[:, None]
        p = attention_of(true, request.sinks)
        whole += float(energy(p.flatten(1, 2) @ v[:, :stop]).sum())
        for width, (_, seen, _) in enumerate(others):
            changed = attention_of(torch.where(read, seen, true), request.sinks) - p
            errors[0, width] += energy(changed.flatten(1, 2) @ v[:, :stop])
        quantized = (p * read).flatten(1, 2)
        for width, values in enumerate(coded_values):
            errors[1, width] += energy(quantized @ (values - v)[:, :stop])
    return errors, whole


def layer_losses(
    held_out: Sequence[Request], key: Reading, value: Reading, scale: float, reader: torch.Tensor
) -> torch.Tensor:
    """Relative energy of the errors of one layer, as far as they are of a kv head: float64 [2, widths, kv_heads], keys
    first.

    Args:
        held_out: requests of the layer.
        key, value: of vectors float32 [kv_heads, n, head_dim].
        scale: factor on the logits.
        reader: W_o W_o^T by kv head, [kv_heads, head_dim, head_dim].
    """
    errors, whole = torch.zeros(2, len(BITS), len(reader), dtype=torch.float64), 0.0
    for request in held_out:
        keys, values = ([of(x, bits) for bits in BITS] for x, of in ((request.k, key), (request.v, value)))
        found, energy = measure(request, keys, values, scale, reader)
        errors, whole = errors + found, whole + energy
    return errors / max(whole, torch.finfo(torch.float64).tiny)


def by_model(
    losses: torch.Tensor,
    result: FitResult,
    codes: tuple[SideCodes, SideCodes],
    model: Any,
    ids: torch.Tensor,
    positions: Positions | None,
    group: int,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Losses as the whole model has them: what it loses by two bits, and by more as much less as the output's error.

    Args:
        losses: of :func:`layer_losses`, [layers, 2, widths, kv_heads], or more widths, those of ``codes`` first.
        result: the fit.
        codes: of keys and of values.
        model: a causal language model of transformers.
        ids: text, int64 [sequences, n].
        positions: that keys may have.
        group: channels that share a scale.
        progress: told about every side of every layer.

    Returns:
        float64 [layers, 2, widths, kv_heads], in nats per token.

    Raises:
        DumpError: the model does not fit the rotations, or its attention is not known.
    """
    layers = len(losses)
    if (found := int(model.config.get_text_config().num_hidden_layers)) != layers:
        raise DumpError(f"the dump has {layers} layers, the model that --text measures with has {found}")
    sides = ((result.key, codes[0]), (result.value, codes[1]))
    keys, values = ([_two_bits(reading(side, n, of, group)) for n in range(layers)] for side, of in sides)
    try:
        two = model_losses(model, ids, list(zip(keys, values, strict=True)), TAIL, positions, progress)
    except ValueError as error:
        raise DumpError(f"{getattr(model.config, '_name_or_path', 'the model')}: {error}") from error
    return from_two_bits(two, losses)


def _two_bits(read: Reading) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: read(x, BITS[0])


def from_two_bits(two: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    """Losses at every width: ``two``, [layers, 2], at two bits of all kv heads, of which each has its share as in
    ``losses``, and by more as much less as there.

    Args:
        two: float64 [layers, 2].
        losses: float64 [layers, 2, widths, kv_heads].
    """
    whole = losses[:, :, :1].sum(-1, keepdim=True)
    return two[..., None, None] * losses / whole.clamp_min(torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class Measured:
    """What losses are measured on.

    Attributes:
        dump, weights: what rotations were fitted to.
        held: held-out requests, chunk -> first.
        context: positions that keys may have, as of the fit.
        device: to measure on.
        ids: text that the model says losses on, int64 [sequences, n]; None for those of the attention output.
    """

    dump: DumpReader
    weights: OutputWeights
    held: Mapping[int, int]
    context: int | None
    device: torch.device
    ids: torch.Tensor | None = None


def apply_goal(
    goal: BitGoal,
    result: FitResult,
    codes: tuple[SideCodes, SideCodes],
    on: Measured,
    codings: Codings,
    group_size: int,
    progress: Progress | None = None,
) -> FitResult:
    """A fit of two bits with the widths that are asked for.

    Args:
        goal: what is asked for.
        result: the fit.
        codes: of keys and of values.
        on: what losses are measured on, for a mean only.
        codings: of keys and of values; "auto" chooses, for a mean.
        group_size: channels that share a scale, for a mean.
        progress: told about every side of every layer, where the model is asked.

    Raises:
        DumpError: the dump is broken, or the model cannot be asked.
        ValueError: the mean is out of reach.
    """
    layers, head_dim, weights = result.key.num_layers, result.key.head_dim, on.weights
    if goal.mean is None:
        assert goal.key is not None
        assert goal.value is not None
        bits: tuple[tuple[ByHead[int], ...], tuple[ByHead[int], ...]] = (goal.key,) * layers, (goal.value,) * layers
        facts: dict[str, object] = {"bits": f"k{goal.key}v{goal.value}"}
    else:
        positions = weights.positions(head_dim, on.context)
        scale = (on.dump.manifest.sm_scale if on.dump.manifest else None) or head_dim**-0.5
        pairs = zip(*forms(codings), strict=True)
        of_forms = [(replace(codes[0], coding=key), replace(codes[1], coding=value)) for key, value in pairs]
        found = []
        for layer in range(layers):
            held_out = moved(held_out_requests(on.dump, layer, on.held, on.device), positions)
            reader = weights.reader(layer, held_out[0].k.shape[0], result.value.head_dim)
            of_layer = []
            with one_thread():
                for of_form in of_forms:
                    key_read, value_read = (
                        reading(side, layer, of, group_size)
                        for side, of in zip((result.key, result.value), of_form, strict=True)
                    )
                    of_layer.append(layer_losses(held_out, key_read, value_read, scale, reader))
            found.append(torch.cat(of_layer, 1))
        losses = torch.stack(found)
        if on.ids is not None:
            try:
                model = load_model(weights.folder, on.device, weights.overrides)
                losses = by_model(losses, result, of_forms[0], model, on.ids, positions, group_size, progress)
            except torch.OutOfMemoryError:
                raise DumpError(
                    f"{weights.folder}: --text needs room for the model on {on.device}; free some"
                ) from None
            if model.dtype != torch.float32:
                said = f"there is no room for the model in float32: its losses were measured in {model.dtype}"
                result = replace(result, remarks=(*result.remarks, said))
        group = largest_group(head_dim, group_size)
        # A server keeps the layers of a model that has others besides whole.
        some = on.dump.manifest is not None and on.dump.manifest.layer_ids is not None
        losses = losses.sum(-1) if some else losses
        plan = goal.choices(losses.flatten(0, 1), head_dim, group, codings)
        bits = tuple(width for width, _ in plan[::2]), tuple(width for width, _ in plan[1::2])
        key_codings, value_codings = (tuple(coding for _, coding in plan[n::2]) for n in (0, 1))
        codes = replace(codes[0], coding=key_codings), replace(codes[1], coding=value_codings)
        spent = [mean_bits(width, coding, group, head_dim) for width, coding in plan]
        facts = {"bits": goal.mean, "mean_bits": round(float(sum(spent) / len(plan)), 4), "bits_group_size": group}
        if on.ids is not None:
            facts["bits_text_tokens"] = on.ids.numel()
    sides = [
        replace(with_bits(side, width, of), metadata=_stated(side.metadata, facts))
        for side, width, of in zip((result.key, result.value), bits, codes, strict=True)
    ]
    return replace(result, key=sides[0], value=sides[1])


def _stated(metadata: RotationMetadata, facts: Mapping[str, object]) -> RotationMetadata:
    return replace(metadata, calibration={**metadata.calibration, **facts})
