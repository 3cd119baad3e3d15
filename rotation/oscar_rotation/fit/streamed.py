"""Rotations from covariances that a server accumulated (:mod:`oscar_rotation.dump.covariances`)."""

from __future__ import annotations

from pathlib import Path

import torch

from oscar_rotation.dump.covariances import STREAMED, StreamedCovariances, read_covariances
from oscar_rotation.errors import DumpError
from oscar_rotation.fit.layer import Progress, SideFit, compose_side
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.targets import DATA_FREE
from oscar_rotation.math.hadamard import hadamard


def fit_covariances(
    root: Path, options: FitOptions, progress: Progress | None = None
) -> tuple[StreamedCovariances, list[SideFit], list[SideFit]]:
    """Both sides of every layer.

    Args:
        root: folder of a covariance dump.
        options: targets must be among "qqt", "ktk", "sst", "vtv" and "hadamard"; no clip ratios, no report.
        progress: told about every layer.

    Returns:
        the covariances, the key sides and the value sides.

    Raises:
        DumpError: a broken dump, or options that need activations.
    """
    for target in (options.key_target, options.value_target):
        if target not in (*STREAMED, DATA_FREE):
            raise DumpError(f"{root}: holds covariances; target {target} needs a dump of activations")
    if options.needs_samples:
        raise DumpError(f"{root}: holds covariances; clip ratios and a report need a dump of activations")
    streamed = read_covariances(root)
    layers = streamed.manifest.num_layers
    keys, values = [], []
    for layer in range(layers):
        keys.append(_side(streamed, options.key_target, streamed.manifest.head_dim, layer, options))
        values.append(_side(streamed, options.value_target, streamed.manifest.value_channels, layer, options))
        if progress is not None:
            progress(layer + 1, layers)
    return streamed, keys, values


def _side(streamed: StreamedCovariances, target: str, head_dim: int, layer: int, options: FitOptions) -> SideFit:
    kv_heads = streamed.manifest.kv_heads
    if target == DATA_FREE:
        rotation = hadamard(head_dim).float()
        return SideFit(rotation if options.share == "layer" else rotation.repeat(kv_heads, 1, 1), None)
    per_head = streamed.targets[target][layer]
    if options.share == "layer":
        return SideFit(*compose_side(per_head.mean(0), options))
    pairs = [compose_side(covariance, options) for covariance in per_head]
    return SideFit(torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs]))
