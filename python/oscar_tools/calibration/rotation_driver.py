"""Rotations of a calibration folder: fitted from its dump, or found where an earlier fit left them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import FITTED, FitRequest
from oscar_rotation.report.report import write_report
from oscar_rotation.terminal import progress_bar
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.weight_files import file_digest

FIT_FILES = "fit_files.json"
"""In a rotations folder: names of the files that the last fit left -> SHA-256."""


def run_fit(
    folder: CalibrationFolder, recipe: str, options: FitOptions, device: str = "auto", out: Path | None = None
) -> Path:
    """Fit a calibration folder's dump; the files replace those that an earlier call left in the same place.

    Args:
        folder: its dump must be complete.
        recipe: one of :data:`oscar_rotation.recipes.FITTED`.
        options: how to fit; a report is left out where the recipe or a dump of covariances cannot give one.
        device: "auto", "cpu" or "cuda".
        out: where to; the recipe's place in the folder by default.

    Returns:
        the folder with both rotation files.

    Raises:
        DumpError: a broken dump, or one that does not do for the recipe.
        OSError: a file cannot be written.
    """
    chosen = FITTED[recipe]
    if is_covariance_dump(folder.dump) or "report" not in chosen.options:
        options = replace(options, report=False)
    with progress_bar() as progress:
        result = chosen.run(FitRequest(folder.dump, options, device=device, progress=progress))
    target = out or folder.rotations(recipe)
    written = result.save(target, result.usual_formats(chosen.suffixes))
    if result.report:
        written.append(write_report(target, result.report))
    _replace_earlier(target, written)
    for remark in result.remarks:
        print(f"note: {remark}")
    print(result.summary)
    return target


def _replace_earlier(folder: Path, written: list[Path]) -> None:
    """Remove what an earlier fit left in a folder and this one did not write, and note what this one wrote.

    Files that are not in the note, or were changed since, are somebody else's and stay.
    """
    note = folder / FIT_FILES
    try:
        earlier = dict(json.loads(note.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        earlier = {}
    kept = {path.name: file_digest(path) for path in written}
    for name, digest in earlier.items():
        path = folder / Path(name).name
        if path.name not in kept and path.is_file() and file_digest(path) == digest:
            path.unlink()
            print(f"removed {path}, of an earlier fit")
    write_text_atomically(note, json.dumps(kept, indent=1) + "\n")
