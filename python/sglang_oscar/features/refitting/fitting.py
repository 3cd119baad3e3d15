"""Fitting the recipe of the files that are served to what was sampled, for rows as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oscar_kernels.format import AnyFormat, SideFormat
from oscar_kernels.layout import CODEBOOK, EXACT
from oscar_rotation.dump import DumpReader
from oscar_rotation.files.by_head import ByHead, alike
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.books import fit_books
from oscar_rotation.fit.held_out import plan_held_out
from oscar_rotation.fit.key_errors import with_key_errors
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.result import FitResult
from oscar_rotation.fit.side_codes import SideCodes, with_bits
from oscar_rotation.recipes import FITTED, PUBLISHED, FitRequest, plus
from oscar_rotation.recipes.base import output_weights
from sglang_oscar.errors import Int2Error
from sglang_oscar.settings import Settings


def fitted_recipe(name: str) -> Any:
    """The recipe that is served.

    Raises:
        Int2Error: it is fitted to nothing.
    """
    if name not in FITTED:
        raise Int2Error(f"rotations {name} are fitted to nothing; start the server on fitted ones (`oscar calibrate`)")
    return FITTED[name]


def fit_again(
    dump: Path, settings: Settings, formats: Mapping[int, AnyFormat], recipe: str, device: torch.device
) -> FitResult:
    """Files of a new fit, for the rows of a server: bits, codings, clip ratios and gains stay.

    Args:
        dump: of the samples.
        settings: where the files that are served are.
        formats: of the layers, by layer id.
        recipe: that is served.
        device: to fit on.

    Raises:
        DumpError, RotationFileError, ValueError: the samples do not suffice, or a file is gone.
    """
    served = [read_rotation_file(str(path)) for path in (settings.k_rotation, settings.v_rotation)]
    keys = [[part.key for part in of.parts for _ in range(part.kv_heads)] for of in formats.values()]
    values = [[of.parts[0].value] for of in formats.values()]
    group = keys[0][0].group_size
    options = _options(served[0], served[1], group)
    request = FitRequest(dump, options, device=str(device))
    result = fitted_recipe(recipe).run(request)
    codes = SideCodes(plus.KEY_ROWS, _codings(keys))
    reader = DumpReader(dump)
    if any(side.coding == CODEBOOK for heads in keys for side in heads):
        positions = output_weights(request, reader, recipe).positions(result.key.head_dim, options.context)
        held = plan_held_out(reader, reader.fit_chunks(), "a codebook")
        books = fit_books(reader, result.key, positions, device, held)
        codes = replace(codes, books=books)
    key = _as_served(result.key, keys, codes)
    value = _as_served(result.value, values, SideCodes(plus.VALUE_ROWS, _codings(values)))
    key = with_key_errors(key, reader, reader.fit_chunks(), group, device)
    return replace(result, key=key, value=value)


def _options(keys: RotationSet, values: RotationSet, group: int) -> FitOptions:
    """How the files that are served were fitted."""
    facts, rope = keys.metadata, keys.metadata.calibration.get("rope")
    if keys.recipe != PUBLISHED:
        # An empty embedding means positions of the dump alone.
        context = None if rope is None else facts.calibration.get("context") if rope else 0
        return FitOptions(context=context, group_size=group)
    stated = {"order": facts.eigen_order, "composition": facts.composition}
    targets = {"key_target": facts.objective, "value_target": values.metadata.objective}
    share, said = "kv_head" if keys.per_head else "layer", {name: text for name, text in stated.items() if text}
    return FitOptions(**targets, **said, share=share, group_size=group)  # type: ignore[arg-type]


def _codings(layers: list[list[SideFormat]]) -> tuple[ByHead[str], ...]:
    return tuple(alike(side.coding for side in heads) for heads in layers)


def _as_served(fitted: RotationSet, layers: list[list[SideFormat]], codes: SideCodes) -> RotationSet:
    """The same for codes as they are served; graphs hold clip ratios and gains."""
    changed = with_bits(fitted, [alike(side.bits for side in heads) for heads in layers], codes)
    transforms = [[side.transform if side.bits != EXACT else None for side in heads] for heads in layers]
    clips = tuple(alike(1.0 if of is None else of.clip for of in heads) for heads in transforms)
    gains = tuple(alike(1.0 if of is None else of.gain for of in heads) for heads in transforms)
    any_gain = any(of is not None and of.gain > 0 for heads in transforms for of in heads)
    return replace(changed, clip_ratios=clips, gains=gains if any_gain else None)
