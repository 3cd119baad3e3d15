"""Where ``oscar fit`` writes to: what is wrong with it is told before the fit."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import typer

from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.files.rotation_file import SUFFIXES, rotation_file_name
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import FittedRecipe
from oscar_rotation.report.report import REPORT_NAME


def formats(dump: Path, recipe: FittedRecipe, options: FitOptions, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """Suffixes of the files that will be written.

    Args:
        dump: folder of the dump.
        recipe: that is fitted.
        options: of the fit.
        asked: what the user asks for; None for the usual format.

    Raises:
        typer.BadParameter: a format that does not hold the fit.
        DumpError: the dump's manifest is broken.
    """
    manifest = DumpManifest.read(dump) if dump.is_dir() else None
    some_layers = manifest is not None and manifest.layer_ids is not None
    usual = recipe.suffixes[:1] if options.share == "layer" and not some_layers else (".safetensors",)
    if asked is None:
        return usual
    fault = f"recipe {recipe.name} is" if not set(asked) <= set(recipe.suffixes) else ""
    if some_layers and ".pt" in asked:
        fault = f"{dump} is of some layers of its model, which are"
    if fault:
        raise typer.BadParameter(f"{fault} written as .safetensors only", param_hint="--format")
    return asked


def check_folder(out: Path, recipe: FittedRecipe, options: FitOptions, suffixes: Collection[str]) -> None:
    """Refuse a folder that cannot be written to, or that files of another fit would stay in beside the new ones: who
    looks for its rotations would find both.

    Args:
        out: folder of the files, which may be missing.
        recipe: that is fitted.
        options: of the fit.
        suffixes: of the files that will be written.

    Raises:
        typer.BadParameter: naming what is in the way.
    """
    place = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        fault = "cannot be written to" if place.is_dir() else "is no folder"
        raise typer.BadParameter(f"{place} {fault}; name another one", param_hint="--out")
    written = {
        rotation_file_name(side, *recipe.names(options, side), suffix) for side in ("k", "v") for suffix in suffixes
    }
    if options.report:
        written.add(REPORT_NAME)
    found = {path.name for suffix in SUFFIXES for path in out.glob(f"[kv]_rotation_*{suffix}")}
    if (out / REPORT_NAME).exists():
        found.add(REPORT_NAME)
    if others := sorted(found - written):
        raise typer.BadParameter(
            f"{out} holds {', '.join(others)} of another fit; remove that, or name another folder", param_hint="--out"
        )
