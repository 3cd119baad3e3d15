"""The driver's fit replaces the files of the fit before it in the same place, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.report.report import REPORT_NAME
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.rotation_driver import FIT_FILES, run_fit

FIRST = {"k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"}
SECOND = {"k_rotation_ktk_r_h.pt", "v_rotation_vtv_r_h.pt"}


@pytest.fixture
def folder(tmp_path: Path, make_dump: Callable[..., Path]) -> CalibrationFolder:
    made = CalibrationFolder(tmp_path)
    make_dump(made.dump)
    return made


def fit(folder: CalibrationFolder, method: str = "qqt_sst", composition: str = "r_h_pbr", report: bool = False) -> Path:
    options = FitOptions.of_method(method, composition=composition, group_size=32, report=report, holdout_tokens=60)
    return run_fit(folder, "paper", options, "cpu")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_second_fit_takes_the_place_of_the_first(
    folder: CalibrationFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    out = fit(folder, report=True)
    assert names(out) == FIRST | {FIT_FILES, REPORT_NAME}
    assert fit(folder, "ktk_vtv", "r_h") == out
    # The report was of the rotations that are gone.
    assert names(out) == SECOND | {FIT_FILES}
    assert {path.name for path in rotation_files(out)} == SECOND
    assert f"removed {out / 'k_rotation_qqt_r_h_pbr.pt'}, of an earlier fit" in capsys.readouterr().out
    fit(folder, "ktk_vtv", "r_h")
    assert names(out) == SECOND | {FIT_FILES}


def test_files_of_others_stay_and_are_named(folder: CalibrationFolder) -> None:
    out = fit(folder)
    (out / "k_rotation_mine.pt").write_bytes(b"copied here")
    (out / "v_rotation_sst_r_h_pbr.pt").write_bytes(b"replaced by hand")
    fit(folder, "ktk_vtv", "r_h")
    assert names(out) == SECOND | {FIT_FILES, "k_rotation_mine.pt", "v_rotation_sst_r_h_pbr.pt"}
    with pytest.raises(RotationFileError) as caught:
        rotation_files(out)
    assert "holds 2 different k_rotation_* files, expected one; delete all but that of the fit you mean" in str(
        caught.value
    )
    assert str(caught.value).endswith(": k_rotation_ktk_r_h.pt, k_rotation_mine.pt")


def test_a_note_never_reaches_beyond_its_folder(folder: CalibrationFolder) -> None:
    """Nor is a broken one of any consequence."""
    out = fit(folder)
    digest = json.loads((out / FIT_FILES).read_text())["k_rotation_qqt_r_h_pbr.pt"]
    outside = folder.path / "k_rotation_qqt_r_h_pbr.pt"
    outside.write_bytes((out / outside.name).read_bytes())
    (out / outside.name).unlink()
    (out / FIT_FILES).write_text(json.dumps({f"../{outside.name}": digest, str(outside): digest}))
    fit(folder, "ktk_vtv", "r_h")
    assert outside.exists()
    (out / FIT_FILES).write_text("[1")
    fit(folder, "ktk_vtv", "r_h")
    assert names(out) >= SECOND
