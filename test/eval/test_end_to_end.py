"""From a model to a table through real servers: an interrupted dump made anew, both kinds of dump, fit, evaluation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.recipes.paper import fit
from oscar_tools.calibration.dump_driver import run_dump
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.cli import app
from oscar_tools.evaluation.methods import make_method
from oscar_tools.evaluation.runner import Evaluation, method_server
from oscar_tools.local_server import ServerFailedError
from support.benchmark_data import ROWS, write_rows
from support.calibration import (
    GROUP,
    SMALL,
    calibrate,
    calibration_data,
    dump_request,
    interrupt,
    run_script,
    script,
    settings,
)
from support.reference import MODEL, document

pytestmark = pytest.mark.server
NO_ANSWERS = 1
"""Exit status: answers of so few tokens are all cut off, and no score comes of them."""


@pytest.fixture(scope="module")
def calibration_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibration_data(tmp_path_factory.mktemp("data") / "calibration.jsonl")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, calibration_file: Path) -> CalibrationFolder:
    return calibrate(tmp_path_factory.mktemp("rotation") / "root", calibration_file)


def test_calibration_leaves_a_fit_of_this_model(calibrated: CalibrationFolder) -> None:
    content = json.loads((calibrated.rotations() / "fit_report.json").read_text())
    assert content["model_id"] == str(MODEL)
    assert len(content["layers"]) == 4
    for layer in content["layers"]:
        # Covariances leave the held-out requests out, so equal importance holds to the last digits of float32.
        assert layer["k"]["chosen"]["importance"] == pytest.approx(1, abs=1e-3)
        assert layer["output_error"]["chosen"] < layer["output_error"]["identity"]


def test_streamed_covariances_give_the_same_rotations(
    tmp_path: Path, calibrated: CalibrationFolder, calibration_file: Path
) -> None:
    streamed = run_dump(dump_request(tmp_path, calibration_file, covariances=True))
    assert not list(streamed.dump.glob("layer_*"))
    dumped_fit, streamed_fit = fit(calibrated.dump, device="cpu"), fit(streamed.dump, device="cpu")
    for first, second in ((dumped_fit.key, streamed_fit.key), (dumped_fit.value, streamed_fit.value)):
        assert first.eigenvalues is not None
        assert second.eigenvalues is not None
        scale = first.eigenvalues.amax(-1, keepdim=True)
        assert ((first.eigenvalues - second.eigenvalues).abs() / scale).max() < 1e-5
        assert first.metadata.calibration["tokens"] == second.metadata.calibration["tokens"]


def test_a_file_of_another_model_stops_the_server(tmp_path: Path, calibrated: CalibrationFolder) -> None:
    (tmp_path / "foreign").mkdir()
    for path in rotation_files(calibrated.rotations()):
        fitted = read_rotation_file(path)
        facts = replace(fitted.metadata, model_id="somebody/another-model", model_hash="ab" * 32)
        save_rotation_file(tmp_path / "foreign" / path.name, replace(fitted, metadata=facts))
    method = make_method("oscar", settings(), tmp_path / "foreign")
    evaluation = Evaluation(settings(), tmp_path, ("aime25",), (method,), (0,), server_args=SMALL)
    with pytest.raises(ServerFailedError, match="fitted for model somebody/another-model"):
        with method_server(evaluation, method):
            pass


@pytest.fixture(scope="module")
def benchmark_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small copy of every data set."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows())
    return folder


@pytest.fixture(scope="module")
def common(calibrated: CalibrationFolder, calibration_file: Path, benchmark_data: Path) -> list[str]:
    """Variables of every script."""
    root = calibrated.path.parents[2]
    variables = {"MODEL": MODEL, "OSCAR_ROOT": root, "DATASET": calibration_file, "EVAL_DATA": benchmark_data}
    variables |= {"GROUP_SIZE": GROUP, "SEEDS": 1, "MAX_TOKENS": 8, "CONCURRENCY": 1}
    variables |= {"SERVER_ARGS": " ".join(SMALL)}
    return [f"{name}={value}" for name, value in variables.items()]


def test_benchmarks_interrupted_and_resumed(tmp_path: Path, calibrated: CalibrationFolder, common: list[str]) -> None:
    place = calibrated.path.parent / "running"
    run = place / "_eval_math500_oscar/seed0"  # test_scoring.py runs all benchmarks
    method = make_method("oscar", settings(), calibrated.rotations())
    with method_server(Evaluation(settings(), calibrated.path, (), (method,), (0,), server_args=SMALL), method) as s:
        asked = [*common, "METHODS=oscar", f"SERVER_URL={s.url}", "LIMIT=5", "BENCHMARKS=math500"]

        def predictions() -> list[str]:
            files = (run / "predictions").rglob("*.jsonl")
            return [
                line for path in files for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
            ]

        interrupt(script("eval_oscar.sh", *asked), {}, tmp_path / "log", lambda: len(predictions()) >= 2)
        kept = predictions()
        assert 2 <= len(kept) < 5
        assert not (run / "result.json").exists()
        said = run_script("eval_oscar.sh", *asked, status=NO_ANSWERS)
        assert "INT2, recipe paper: 0 runs done, 1 to do" in said
        assert "seed 0: no answer (5 asked, 0 answered, 5 cut off)" in said
        assert len(predictions()) == 5
        assert set(kept) <= set(predictions())
        assert "| Method | BPE | MATH500 |" in (place / "results.md").read_text()
        assert "| INT2, recipe paper | 2.5" in (place / "results.md").read_text()
    result = json.loads((run / "result.json").read_text())
    assert len(result["scores"]) == 5
    assert set(result["scores"].values()) <= {0.0, 1.0}


def oscar(common: list[str], *arguments: str) -> str:
    """Run a command in this process, and return what it said."""
    variables = dict(variable.split("=", 1) for variable in common)
    done = CliRunner().invoke(app, arguments, env=variables)
    assert done.exit_code == NO_ANSWERS, done.output
    return done.stdout


@pytest.fixture(scope="module")
def table(calibrated: CalibrationFolder, common: list[str]) -> str:
    """GPQA with BF16 and OSCAR, servers and all."""
    oscar(common, "eval", str(MODEL), "--benchmarks", "gpqa", "--file-clips", "--methods", "bf16,oscar")
    return (calibrated.path / "results.md").read_text()


def test_table_of_two_methods(table: str, calibrated: CalibrationFolder) -> None:
    assert "| BF16 | 16.00 |" in table
    assert "| OSCAR | 2.5" in table
    assert "Paired differences from BF16" in table
    server = (calibrated.path / "server_oscar.log").read_text()
    assert "effective bits per element" in server


def test_an_ablation(  # Of other ablations and methods test_drivers.py shows that they make the server they name.
    tmp_path: Path, table: str, calibrated: CalibrationFolder, common: list[str]
) -> None:
    questions = [{"question": document(400, seed, 1).text, "choices": ["a", "b"], "answer": 0} for seed in range(3)]
    mmlu = write_rows(tmp_path / "mmlu.jsonl", questions)
    said = oscar(
        common, "ablation", "calibration", str(MODEL), "--only", "calibration_MMLU_2000", "--benchmarks", "gpqa",
        "--dataset-path", f"MMLU={mmlu}",
    )  # fmt: skip
    assert "BF16: 1 runs done, 0 to do" in said
    result = (calibrated.path / "ablation_calibration.md").read_text()
    assert "| MMLU, 2k tokens | 2.5" in result
    assert "Paired differences from BF16" in result
