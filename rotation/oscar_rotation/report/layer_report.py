"""What a rotation does to one layer, beside identity and Hadamard (the figures of the paper's table 10, and errors).

Per side and rotation:

* ``importance``: max / mean of the diagonal of R^T C R, C being C_Q for keys and C_S for values. 1.00 means that
  every channel matters equally, which U H guarantees (paper, lemma 1).
* ``largest``: the largest rotated magnitude.
* ``group_ranges``: max - min within each quantization group, mean over tokens and heads: what sets the scale.
* ``residual``: tr(E), the mean squared quantization error of a token and head, clipping included.
* ``logit_error`` (keys): ||Q K^T - Q K^^T||^2 / ||Q K^T||^2 over all pairs of a request (paper, equation 1).
* ``output_error``: relative squared error of the attention outputs with this side quantized, sink tokens exact.

``output_error`` of the layer has both sides quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oscar_kernels.layout import largest_group
from oscar_rotation.fit.samples import HeadSample
from oscar_rotation.math.compose import identity
from oscar_rotation.math.hadamard import hadamard
from oscar_rotation.math.quantized import quantized
from oscar_rotation.report.inspect import spectrum_summary

CHOSEN = "chosen"


def layer_report(
    rotations: tuple[torch.Tensor, torch.Tensor],
    metrics: tuple[torch.Tensor, torch.Tensor],
    clip_ratios: tuple[float, float],
    samples: Sequence[HeadSample],
    group_size: int,
) -> dict[str, Any]:
    """Figures of one layer as JSON values.

    Args:
        rotations: of keys and of values, float32 [kv_heads, d, d] each.
        metrics: C_Q and C_S, float64, [1, d, d] where a rotation is shared by the layer, else [kv_heads, d, d].
        clip_ratios: of keys and of values, used for every rotation alike.
        samples: requests of the layer.
        group_size: channels that share a scale.

    Returns:
        ``spectrum`` of both metrics, ``k`` and ``v``: rotation name -> figures (see the module), and
        ``output_error``: rotation name -> figure; names are "chosen", "hadamard" and "identity".
    """
    candidates = {CHOSEN: rotations}
    for name, make in (("hadamard", hadamard), ("identity", identity)):
        keys, values = (make(side.shape[-1]).to(side).expand_as(side) for side in rotations)
        candidates[name] = (keys, values)
    report: dict[str, Any] = {
        "spectrum": {side: spectrum_summary(torch.linalg.eigvalsh(m.mean(0))) for side, m in _sides(metrics)},
        "k": {},
        "v": {},
        "output_error": {},
    }
    energy = sum(sample.energy for sample in samples) or 1.0
    for name, pair in candidates.items():
        restored: dict[str, list[torch.Tensor]] = {}
        for (side, rotation), metric, ratio in zip(_sides(pair), metrics, clip_ratios, strict=True):
            figures, restored[side] = _measure(side, rotation, ratio, samples, group_size)
            figures["importance"] = importance(rotation, metric)
            report[side][name] = figures
        both = zip(samples, restored["k"], restored["v"], strict=True)
        report["output_error"][name] = sum(s.error(k=k, v=v) for s, k, v in both) / energy
        for side in ("k", "v"):
            errors = (s.error(**{side: x}) for s, x in zip(samples, restored[side], strict=True))
            report[side][name]["output_error"] = sum(errors) / energy
    return report


def importance(rotation: torch.Tensor, metric: torch.Tensor) -> float:
    """max / mean of the diagonal of R^T C R, the largest over heads.

    Args:
        rotation: [kv_heads, d, d].
        metric: [1 or kv_heads, d, d].
    """
    exact = rotation.double()
    diagonal = (exact.mT @ metric.to(exact) @ exact).diagonal(dim1=-2, dim2=-1)
    return float((diagonal.amax(-1) / diagonal.mean(-1)).max())


def _sides(pair: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [("k", pair[0]), ("v", pair[1])]


def _measure(
    side: str, rotations: torch.Tensor, clip_ratio: float, samples: Sequence[HeadSample], group_size: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    group = largest_group(rotations.shape[-1], group_size)
    ranges, restored = [], []
    largest = residual = logit_error = logit_energy = 0.0
    rows = 0
    for sample in samples:
        rotation = rotations[sample.head]
        exact = sample.k if side == "k" else sample.v
        rotated = exact @ rotation
        grouped = rotated.unflatten(-1, (-1, group))
        ranges.append((grouped.amax(-1) - grouped.amin(-1)).sum(0, dtype=torch.float64))
        lost = quantized(rotated, clip_ratio, group) - rotated
        largest = max(largest, float(rotated.abs().max()))
        residual += float(lost.square().sum(dtype=torch.float64))
        rows += len(rotated)
        back = lost @ rotation.mT
        restored.append(exact + back)
        if side == "k":
            queries = sample.q.flatten(0, 1)
            gram = queries.mT @ queries
            logit_error += float(((back @ gram) * back).sum(dtype=torch.float64))
            logit_energy += float(((exact @ gram) * exact).sum(dtype=torch.float64))
    figures: dict[str, Any] = {
        "largest": largest,
        "group_ranges": (torch.stack(ranges).sum(0) / rows).tolist(),
        "residual": residual / rows,
    }
    if side == "k":
        figures["logit_error"] = logit_error / logit_energy if logit_energy else 0.0
    return figures, restored
