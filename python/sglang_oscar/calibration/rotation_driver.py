"""Rotations of a calibration folder: fitted from its dump, or found where an earlier fit left them."""

from __future__ import annotations

from pathlib import Path

from oscar_rotation.cli import fit_with_progress, save_fit
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.errors import RotationFileError
from oscar_rotation.fit.calibrate import FitOptions
from oscar_rotation.report.report import write_report
from sglang_oscar.calibration.folders import CalibrationFolder


def run_fit(folder: CalibrationFolder, options: FitOptions, device: str = "auto", out: Path | None = None) -> Path:
    """Fit a calibration folder's dump.

    Args:
        folder: its dump must be complete.
        options: how to fit; a report is left out for covariances, which cannot give one.
        device: "auto", "cpu" or "cuda".
        out: where to; ``rotations`` of the folder by default.

    Returns:
        the folder with both rotation files.

    Raises:
        DumpError: a broken dump.
        OSError: a file cannot be written.
    """
    if options.report and is_covariance_dump(folder.dump):
        options = FitOptions(**(vars(options) | {"report": False}))
    result = fit_with_progress(folder.dump, options, device, allow_incomplete=False)
    target = out or folder.rotations
    save_fit(result, target)
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
        files = sorted(path for path in folder.glob(f"{side}_rotation_*") if path.suffix in (".pt", ".safetensors"))
        stems = {path.stem for path in files}
        if len(stems) != 1:
            what = "no" if not stems else f"{len(stems)} different"
            raise RotationFileError(
                f"{folder}: holds {what} {side}_rotation_* files, expected one; run compute_rotation.sh or set ROT_DIR"
            )
        found.append(files[0])
    return found[0], found[1]
