"""Formats of a server's layers: transforms from rotation files or built-in recipes, rows from flags and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from oscar_kernels.format import AnyFormat, CutFormat, LayerFormat, SideFormat
from oscar_kernels.layout import CODEBOOK, EXACT, RowLayout
from oscar_kernels.transform import SideTransform
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.by_head import flat
from oscar_rotation.files.identity import ModelIdentity
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bit_goal import coding_at
from oscar_rotation.fit.key_errors import stated_errors
from oscar_rotation.load import load_rotation
from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.geometry import row_layouts
from sglang_oscar.formats.model_identity import model_identity
from sglang_oscar.settings import DEFAULT_K_CLIP, DEFAULT_V_CLIP, Settings

IDENTITY = "identity"


Part = tuple[slice, SideFormat]
"""Neighbouring kv heads of a layer, and how one side of them is stored."""


class Loaded(NamedTuple):
    """Formats of a model's layers by global layer id; the recipe that their rotations are of: of built-in ones the
    name, such as "hadamard", or "hadamard+identity" where keys and values differ; and the errors of keys that the fit
    had (:mod:`oscar_rotation.fit.key_errors`) by layer id, None where the file does not state them."""

    formats: Mapping[int, AnyFormat]
    recipe: str
    key_errors: Mapping[int, float] | None


def load_formats(
    settings: Settings,
    layout: RowLayout,
    layers: Sequence[int],
    model: ModelIdentity | None = None,
    value_layout: RowLayout | None = None,
) -> Mapping[int, AnyFormat]:
    """The formats of :func:`load`."""
    return load(settings, layout, layers, model, value_layout).formats


def load(
    settings: Settings,
    layout: RowLayout,
    layers: Sequence[int],
    model: ModelIdentity | None = None,
    value_layout: RowLayout | None = None,
) -> Loaded:
    """Formats of the layers of a model, with all its kv heads, by global layer id; tensors are on the CPU.

    Args:
        settings: where rotations are and which clip ratios override theirs.
        layout: of the rows, with the kv heads of the whole model; their bits are what the files or the settings say.
        layers: global ids of the layers with an INT2 cache, ascending.
        model: the model to be served; files made for another are refused. None skips this check.
        value_layout: of the rows of values; None where they are those of the keys.

    Raises:
        Int2Error: a variable is unset or a file is missing, broken, made for another model or of another recipe than
            the other file, or than SGLANG_OSCAR_RECIPE where that is set.
    """
    model = None if settings.allow_other_model else model

    def of_side(
        side: Literal["k", "v"], layout: RowLayout, override: float | None, default: float
    ) -> tuple[list[list[Part]], RotationSet]:
        source = getattr(settings, f"{side}_rotation")
        found = _read(side, settings, layers, layout, model)
        coded = _with_bits(side, source, getattr(settings, f"{side}_bits"), found)
        coded = _with_codings(side, source, getattr(settings, f"{side}_coding"), coded)
        return [_parts(coded, layer, source, layout, override, default) for layer in range(found.num_layers)], found

    value_layout = layout if value_layout is None else value_layout
    keys, of_keys = of_side("k", layout, settings.k_clip_ratio, DEFAULT_K_CLIP)
    values, of_values = of_side("v", value_layout, settings.v_clip_ratio, DEFAULT_V_CLIP)
    if of_keys.recipe != of_values.recipe:
        raise Int2Error(
            f"{settings.named('k')}: {settings.k_rotation} is of the recipe {of_keys.recipe}, "
            f"{settings.named('v')}: {settings.v_rotation} is of the recipe {of_values.recipe}; "
            "give two files of one fit"
        )
    formats = {
        layer_id: _format(layout, value_layout.head_dim, parts, value)
        for layer_id, parts, ((_, value),) in zip(layers, keys, values, strict=True)
    }
    sources = (settings.k_rotation, settings.v_rotation)
    named = [source if source is not None and source in BUILT_IN else of_keys.recipe for source in sources]
    errors = stated_errors(of_keys.metadata.calibration, layout.group_size, len(layers))
    stated = None if errors is None else dict(zip(layers, errors, strict=True))
    return Loaded(MappingProxyType(formats), "+".join(dict.fromkeys(named)), stated)


def model_formats(args: Any, settings: Settings, model: Any) -> Mapping[int, AnyFormat]:
    """The formats of :func:`model_rotations`."""
    return model_rotations(args, settings, model).formats


def model_rotations(args: Any, settings: Settings, model: Any) -> Loaded:
    """What the model that this process serves is loaded with, with all its kv heads.

    They are those of the first call: weights that are loaded later must fit the caches of the start.

    Args:
        args: SGLang's ServerArgs.
        settings: of int2 mode.
        model: SGLang's ModelConfig.

    Raises:
        Int2Error: as :func:`load`, or the group size does not fit the model.
    """
    layouts = row_layouts(args, settings, model, model.get_total_num_kv_heads())
    return _kept(settings, layouts, cached_layer_ids(model), model_identity(args.model_path, model))


@cache
def _kept(
    settings: Settings, layouts: tuple[RowLayout, RowLayout], layers: tuple[int, ...], model: ModelIdentity
) -> Loaded:
    return load(settings, layouts[0], layers, model, layouts[1])


def _read(
    side: Literal["k", "v"], settings: Settings, layers: Sequence[int], layout: RowLayout, model: ModelIdentity | None
) -> RotationSet:
    """Rotations of one side, checked against the model and the settings."""
    named, source, recipe = settings.named(side), getattr(settings, f"{side}_rotation"), settings.recipe
    if source is None:
        raise Int2Error(
            f"{named} is not set: give a rotation file (fit one with `oscar fit`), or the built-in recipe "
            "`hadamard` or `identity`"
        )
    try:
        found = load_rotation(
            source, num_layers=len(layers), head_dim=layout.head_dim, side=side, model=model, layers=layers
        )
    except RotationFileError as error:
        again = f"; remove {Path(source).parent}, and the next start calibrates again" if settings.is_cached else ""
        raise Int2Error(f"{named}: {error}{again}") from None
    if recipe is not None and found.recipe != recipe:
        raise Int2Error(
            f"{named}: {source} is of the recipe {found.recipe}, SGLANG_OSCAR_RECIPE asks for {recipe}; "
            f"fit one with `oscar fit --recipe {recipe}`, or unset SGLANG_OSCAR_RECIPE"
        )
    books = found.codebooks
    for name, heads in (
        ("rotations", found.rotations.shape[1] if found.per_head else None),
        ("centers", None if found.centers is None else found.centers.shape[1]),
        ("codebooks", None if books is None else books.points.shape[1]),
        ("codes", found.coded_heads),
    ):
        if heads not in (None, layout.kv_heads):
            raise Int2Error(
                f"{named}: {source} has {name} of {heads} kv heads, the model has {layout.kv_heads}; use this "
                "model's file"
            )
    if found.centers is not None and side == "v":
        raise Int2Error(f"{named}: {source} centers values, which is not served; use this model's value file")
    if books is not None and side == "v":
        raise Int2Error(f"{named}: {source} has codebooks of values, which are not served; use this model's value file")
    return found


def _with_bits(side: Literal["k", "v"], source: str | None, asked: int | None, found: RotationSet) -> RotationSet:
    """With the bits that the file says, of a built-in recipe those that the variable says."""
    stated = set(flat(found.bits or (2,)))
    if asked is None or stated == {asked}:
        return found
    if source not in BUILT_IN:
        variable, states = f"SGLANG_OSCAR_{side.upper()}_BITS", ", ".join(map(str, sorted(stated)))
        raise Int2Error(
            f"{variable}={asked}: {source} is fitted for codes of {states} bits; unset the variable, or fit a file "
            "for others with `oscar fit --bits`"
        )
    return replace(found, bits=(asked,) * found.num_layers)


def _with_codings(side: Literal["k", "v"], source: str | None, asked: str | None, found: RotationSet) -> RotationSet:
    """With the codings that the file says, of a built-in recipe those that the variable says."""
    every = [run for layer in range(found.num_layers) for run in found.runs(layer)]
    # A codebook stands for two bits, and 16 bits are no codes: other layers are affine whatever is asked for.
    if asked is None or all(run.coding == coding_at(asked, run.bits) for run in every):
        return found
    variable = f"SGLANG_OSCAR_{side.upper()}_CODING"
    if source not in BUILT_IN:
        flag = "--key-coding" if side == "k" else "--value-coding"
        said = " and ".join(sorted({run.coding for run in every}))
        raise Int2Error(
            f"{variable}={asked}: {source} has codes that are {said}; unset the variable, "
            f"or fit a file with `oscar fit {flag} {asked}`"
        )
    if asked == CODEBOOK:
        raise Int2Error(
            f"{variable}={asked}: {source} has no codebooks; fit a file with `oscar fit --key-coding {asked}`"
        )
    return replace(found, codings=tuple(coding_at(asked, run.bits) for run in every))


def _format(layout: RowLayout, value_head_dim: int, keys: Sequence[Part], value: SideFormat) -> AnyFormat:
    """A layer of whose keys neighbouring heads may have formats of their own."""
    parts = [
        LayerFormat(len(range(layout.kv_heads)[heads]), layout.head_dim, key, value.of_heads(heads), value_head_dim)
        for heads, key in keys
    ]
    return parts[0] if len(parts) == 1 else CutFormat(tuple(parts))


def _parts(
    found: RotationSet, layer: int, source: str | None, layout: RowLayout, override: float | None, default: float
) -> list[Part]:
    """One side of a layer: what is stored alike, in the order of heads."""
    matrix, dual, center = (
        None if tensors is None else tensors[layer] for tensors in (found.rotations, found.duals, found.centers)
    )
    parts = []
    for heads, bits, coding, clip, gain in found.runs(layer):
        if bits == EXACT:
            transform = SideTransform() if source in BUILT_IN else _of_exact(matrix, dual, center)
        else:
            ratio = (default if clip is None else clip) if override is None else override
            # The identity costs nothing where it is not multiplied by.
            whole = SideTransform(None if source == IDENTITY else matrix, dual, center, ratio, gain or 0.0)
            transform = whole.of_heads(heads)
        book = found.codebooks.of_layer(layer, heads) if found.codebooks and coding == CODEBOOK else None
        side = SideFormat(layout.group_size, layout.scale_dtype, bits, transform, layout.exact_dtype, coding, book)
        parts.append((heads, side))
    return parts


def _of_exact(matrix: torch.Tensor | None, dual: torch.Tensor | None, center: torch.Tensor | None) -> SideTransform:
    """What a file states for a layer that is left exact: without a unit matrix or a center of zeros, which would cost a
    product, and the last bit of what is stored, for nothing."""
    stated = [x for x in (matrix, dual) if x is not None]
    plain = all(torch.equal(x, torch.eye(x.shape[-1]).expand_as(x)) for x in stated)
    centered = center is not None and bool(center.any())
    return SideTransform(None if plain else matrix, None if plain else dual, center if centered else None)
