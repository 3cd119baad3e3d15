"""Rotations of a calibration folder: fitted from its dump, or found where an earlier fit left them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import SUFFIXES
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import FITTED, FitRequest
from oscar_rotation.report.report import write_report
from oscar_rotation.terminal import progress_bar
from sglang_oscar.calibration.folders import CalibrationFolder


def run_fit(
    folder: CalibrationFolder, recipe: str, options: FitOptions, device: str = "auto", out: Path | None = None
) -> Path:
    """Fit a calibration folder's dump.

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
    result.save(target, result.usual_formats(chosen.suffixes))
    if result.report:
        write_report(target, result.report)
    for remark in result.remarks:
        print(f"note: {remark}")
    return target


def rotation_files(folder: Path) -> tuple[Path, Path]:
    """The key and the value file of a rotations folder.

    Raises:
        RotationFileError: there is not exactly one of each.
    """
    found = []
    for side in ("k", "v"):
        files = sorted(path for path in folder.glob(f"{side}_rotation_*") if path.suffix in SUFFIXES)
        stems = {path.stem for path in files}
        if len(stems) != 1:
            what = "no" if not stems else f"{len(stems)} different"
            raise RotationFileError(
                f"{folder}: holds {what} {side}_rotation_* files, expected one; run compute_rotation.sh or set ROT_DIR"
            )
        found.append(files[0])
    return found[0], found[1]
