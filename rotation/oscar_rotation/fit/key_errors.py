"""The relative error of logits that keys had at their fit, by layer: what a server compares its own traffic with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from oscar_kernels.codec import encode_rows
from oscar_kernels.format import SideFormat
from oscar_kernels.key_error import LEAST, MOST, logit_errors, transformed
from oscar_kernels.layout import CODEBOOK, largest_group
from oscar_kernels.transform import SideTransform
from oscar_rotation.dump import DumpReader
from oscar_rotation.files.rotation_set import DEFAULT_CLIP_RATIOS, RotationSet

KEY = "key_errors"
"""In what files state of their calibration."""
REQUESTS = 8
"""Of a dump, the last ones, that are measured."""


def with_key_errors(
    keys: RotationSet, dump: DumpReader, chunks: Sequence[int], group_size: int, device: torch.device
) -> RotationSet:
    """Keys whose metadata states their errors, :data:`KEY`: ``group_size`` and ``layers``, a number for each.

    The same where no request of the dump is long enough, or no server has such rows.

    Args:
        keys: as fitted to the dump.
        dump: of activations.
        chunks: of it, that were fitted to.
        group_size: channels that share a scale.
        device: where to.

    Raises:
        DumpError: the dump is broken.
    """
    group_size, places = largest_group(keys.head_dim, group_size), _places(dump, chunks)
    if not places or not _servable(keys, group_size):
        return keys
    layers = [_error(keys, layer, dump, places, group_size, device) for layer in range(keys.num_layers)]
    said = {KEY: {"group_size": group_size, "layers": [float(f"{error:.4g}") for error in layers]}}
    return replace(keys, metadata=replace(keys.metadata, calibration=keys.metadata.calibration | said))


def stated_errors(calibration: Mapping[str, Any], group_size: int, layers: int) -> list[float] | None:
    """What a file states, by layer; None where it states nothing, or something of other rows.

    Args:
        calibration: of the file of the keys.
        group_size: that is served.
        layers: how many there are.
    """
    said = calibration.get(KEY)
    if not isinstance(said, dict) or said.get("group_size") != group_size:
        return None
    errors = said.get("layers")
    known = isinstance(errors, list) and all(type(x) in (int, float) and 0 <= x < 1e9 for x in errors)
    return [float(x) for x in errors] if known and len(errors) == layers else None  # type: ignore[union-attr,arg-type]


def _servable(keys: RotationSet, group_size: int) -> bool:
    try:
        SideFormat(group_size).layout(1, keys.head_dim)
    except ValueError:
        return False
    return True


def _places(dump: DumpReader, chunks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Chunk and tokens, begin and end, of the last requests that are long enough."""
    found: list[tuple[int, int, int]] = []
    for chunk in chunks:
        end = 0
        for length in dump.seq_lens(0, chunk):
            end += length
            if length >= LEAST:
                found.append((chunk, end - min(length, MOST), end))
    return found[-REQUESTS:]


def _error(
    keys: RotationSet,
    layer: int,
    dump: DumpReader,
    places: Sequence[tuple[int, int, int]],
    group_size: int,
    device: torch.device,
) -> float:
    if keys.exact(layer):
        return 0.0
    dual, center = (None if x is None else x[layer] for x in (keys.duals, keys.centers))
    sides = []
    for heads, bits, coding, clip, gain in keys.runs(layer):
        ratio = DEFAULT_CLIP_RATIOS["k"] if clip is None else clip
        transform = SideTransform(keys.rotations[layer], dual, center, ratio, gain or 0.0).of_heads(heads)
        book = keys.codebooks.of_layer(layer, heads) if keys.codebooks and coding == CODEBOOK else None
        side = SideFormat(group_size, bits=bits, transform=transform, coding=coding, codebook=book)
        sides.append((heads, side.to(device)))
    sums, loaded = torch.zeros(2, device=device), None
    for chunk, begin, end in places:
        if loaded is None or loaded[0] != chunk:
            loaded = chunk, dump.load(layer, chunk)
        q, k = (x[begin:end].to(device) for x in (loaded[1].q, loaded[1].k))
        for heads, side in sides:
            own, queries = k[:, heads], q.unflatten(1, (k.shape[1], -1))[:, heads].flatten(1, 2)
            layout = side.layout(own.shape[1], own.shape[2])
            of = side.transform
            rows = encode_rows(transformed(own, side), layout, of.clip, of.gain, side.codebook)
            sums += logit_errors(queries, own, rows, side, layout)
    error, energy = sums.tolist()
    return float(error / max(energy, 1e-30))
