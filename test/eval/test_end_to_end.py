"""From a model to a table through real servers: an interrupted dump made anew, both kinds of dump, fit, evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oscar_rotation.convert import convert
from oscar_rotation.fit import FitOptions, fit
from oscar_rotation.model_table import model_settings
from sglang_oscar.drivers.dump_driver import DumpRequest, run_dump
from sglang_oscar.drivers.folders import CalibrationFolder, dump_state
from sglang_oscar.drivers.rotation_driver import rotation_files, run_fit
from sglang_oscar.evaluation.harness import check_harness, harness_python
from sglang_oscar.evaluation.methods import make_method
from sglang_oscar.evaluation.runner import EvaluationPlan, evaluate, method_server, scores_of
from sglang_oscar.evaluation.table import collect, markdown
from sglang_oscar.local_server import ServerFailedError
from support.benchmark_data import aime_rows, write_rows
from support.reference import MODEL, document

pytestmark = pytest.mark.server

SMALL = ("--mem-fraction-static", "0.2", "--max-total-tokens", "16384")
TOKENS = 1500


@pytest.fixture(scope="module")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"text": document(450, 900 + seed, facts=1).text} for seed in range(5)]
    return write_rows(tmp_path_factory.mktemp("data") / "calibration.jsonl", rows)


def request(root: Path, data: Path, covariances: bool = False) -> DumpRequest:
    settings = model_settings(str(MODEL)).overridden(group_size=64, server_args=())
    return DumpRequest(settings, root, str(data), TOKENS, covariances=covariances, server_args=SMALL)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, calibration_file: Path) -> CalibrationFolder:
    """A calibration whose first dump was interrupted."""
    root = tmp_path_factory.mktemp("rotation")
    command = [sys.executable, "-m", "sglang_oscar", "dump", str(MODEL), "--root", str(root)]
    command += ["--dataset", str(calibration_file), "--tokens", str(TOKENS), "--group-size", "64"]
    command += ["--server-args", " ".join(SMALL)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (manifests := list(root.rglob("manifest.json"))) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()  # the hardest interruption; the server dies with the process that started it
    process.wait()
    (manifest,) = manifests
    assert dump_state(manifest.parent) == "interrupted"
    folder = run_dump(request(root, calibration_file))
    assert folder.dump == manifest.parent
    assert dump_state(folder.dump) == "complete"
    run_fit(folder, FitOptions(fit_clip=True, report=True, group_size=64, holdout_tokens=200), "cpu")
    return folder


def test_calibration_leaves_a_fit_of_this_model(calibrated: CalibrationFolder) -> None:
    content = json.loads((calibrated.rotations / "fit_report.json").read_text())
    assert content["model_id"] == str(MODEL)
    assert len(content["layers"]) == 4
    for layer in content["layers"]:
        # Covariances leave the held-out requests out, so equal importance holds to the last digits of float32.
        assert layer["k"]["chosen"]["importance"] == pytest.approx(1, abs=1e-3)
        assert layer["output_error"]["chosen"] < layer["output_error"]["identity"]


def test_streamed_covariances_give_the_same_rotations(
    tmp_path: Path, calibrated: CalibrationFolder, calibration_file: Path
) -> None:
    streamed = run_dump(request(tmp_path, calibration_file, covariances=True))
    assert not list(streamed.dump.glob("layer_*"))
    dumped_fit, streamed_fit = fit(calibrated.dump, device="cpu"), fit(streamed.dump, device="cpu")
    for first, second in ((dumped_fit.key, streamed_fit.key), (dumped_fit.value, streamed_fit.value)):
        assert first.eigenvalues is not None
        assert second.eigenvalues is not None
        scale = first.eigenvalues.amax(-1, keepdim=True)
        assert ((first.eigenvalues - second.eigenvalues).abs() / scale).max() < 1e-5
        assert first.metadata.calibration["tokens"] == second.metadata.calibration["tokens"]


def test_evaluation_through_the_harness(tmp_path: Path, calibrated: CalibrationFolder) -> None:
    if subprocess.run([harness_python(), "-c", "import evalscope"], capture_output=True, check=False).returncode:
        pytest.skip("no evalscope here; name an interpreter that has it in OSCAR_HARNESS_PYTHON")
    check_harness()
    settings = model_settings(str(MODEL)).overridden(
        group_size=64, server_args=(), max_tokens=12, concurrency=2, seeds=1
    )
    plan = EvaluationPlan(
        settings,
        tmp_path,
        ("aime25",),
        (make_method("oscar", settings, calibrated.rotations, file_clips=True),),
        (0,),
        {"aime25": write_rows(tmp_path / "aime25.jsonl", aime_rows())},
        server_args=SMALL,
    )
    evaluate(plan)
    (result,) = scores_of(tmp_path, ["aime25"], "oscar")["aime25"]
    assert len(result["scores"]) == 3
    assert "| OSCAR |" in markdown(collect([("oscar", "OSCAR", 2.5, tmp_path)], ["aime25"]), "reference")
    assert "effective bits per element" in (tmp_path / "server_oscar.log").read_text()


def test_a_file_of_another_model_stops_the_server(tmp_path: Path, calibrated: CalibrationFolder) -> None:
    for path in rotation_files(calibrated.rotations):
        convert(path, tmp_path / "foreign" / path.name, model_id="somebody/another-model")
    settings = model_settings(str(MODEL)).overridden(group_size=64, server_args=())
    method = make_method("oscar", settings, tmp_path / "foreign")
    plan = EvaluationPlan(settings, tmp_path, ("aime25",), (method,), (0,), server_args=SMALL)
    with pytest.raises(ServerFailedError, match="fitted for somebody/another-model, not for"):
        with method_server(plan, method):
            pass
