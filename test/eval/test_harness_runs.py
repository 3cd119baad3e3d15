"""Runs of the harness are finished once, resumed after a crash, and never mixed with runs of other settings."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from pyarrow import parquet
from typer.testing import CliRunner

from oscar_rotation.model_table import model_settings
from oscar_tools.calibration.data import local_data_sets
from oscar_tools.calibration.errors import DataError, HarnessError
from oscar_tools.cli import app
from oscar_tools.evaluation import runner
from oscar_tools.evaluation.answers import Answers, count
from oscar_tools.evaluation.benchmarks import BENCHMARKS
from oscar_tools.evaluation.commands import local_data
from oscar_tools.evaluation.harness import BenchmarkRun, check_harness, read_result, run, stage, task_config
from oscar_tools.evaluation.methods import make_method
from oscar_tools.evaluation.runner import Evaluation, RunningServer, evaluate
from oscar_tools.evaluation.server_facts import read
from support.benchmark_data import ROWS, aime_rows, write_rows
from support.server_answers import INT2, answering, server_info

STUB = '''#!{python}
"""Stands in for the harness: answers every row, or dies as the file "crash" says."""
import json, sys
from pathlib import Path

from pyarrow import parquet

if sys.argv[1] == "-c":
    sys.exit(0)
config = json.loads(Path(sys.argv[2]).read_text())
work = Path(config["work_dir"])
(work / "configs").mkdir(exist_ok=True)
(work / "configs/task_config.yaml").write_text("")
calls = Path({calls!r})
calls.write_text(calls.read_text() + json.dumps([bool(config["use_cache"]), config["api_url"]]) + "\\n")
crash = Path({crash!r})
if crash.exists():
    print(crash.read_text())
    crash.unlink()
    sys.exit(3)
data = next(iter(config["dataset_args"].values()))
rows = range(parquet.read_metadata(Path(data["local_path"]) / (data["eval_split"] + ".parquet")).num_rows)
folder = work / "reviews" / "model"
folder.mkdir(parents=True)
predictions = work / "predictions" / "model"
predictions.mkdir(parents=True)
with open(predictions / "set_default.jsonl", "w") as file:
    for index, _ in enumerate(rows):
        choice = {{"stop_reason": {stop!r}, "message": {{"content": "ANSWER: 3"}}}}
        file.write(json.dumps({{"index": index, "model_output": {{"choices": [choice]}}}}) + "\\n")
with open(folder / "set_default.jsonl", "w") as file:
    for index, _ in enumerate(rows):
        score = {{"value": {{"acc": index % 2}}, "main_score_name": "acc"}}
        file.write(json.dumps({{"index": index, "sample_score": {{"score": score}}}}) + "\\n")
'''


RUNNING = RunningServer("http://x", read(server_info()))


class Stub:
    """A stand-in harness and what it was asked."""

    def __init__(self, folder: Path, stop: str = "stop") -> None:
        self.calls, self.crash = folder / "calls", folder / "crash"
        self.calls.write_text("")
        self.python = folder / "python"
        self.python.write_text(
            STUB.format(python=sys.executable, calls=str(self.calls), crash=str(self.crash), stop=stop)
        )
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def asked(self) -> list[list[object]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tmp_path)
    monkeypatch.setenv("OSCAR_HARNESS_PYTHON", str(made.python))
    return made


def request(tmp_path: Path, **changes: object) -> BenchmarkRun:
    data = write_rows(tmp_path / "aime.jsonl", aime_rows())
    values: dict[str, object] = {
        "benchmark": BENCHMARKS["aime25"],
        "settings": model_settings("qwen3-8B"),
        "url": "http://127.0.0.1:1",
        "seed": 0,
        "folder": tmp_path / "seed0",
        "local": data,
    }
    return BenchmarkRun(**(values | changes))  # type: ignore[arg-type]


def test_a_run_is_scored_and_not_repeated(tmp_path: Path, stub: Stub) -> None:
    first = run(request(tmp_path))
    assert first["score"] == pytest.approx(100 / 3)
    assert list(first["scores"].values()) == [0.0, 1.0, 0.0]
    assert first["answers"] == {"asked": 3, "answered": 3, "cut_off": 0}
    assert run(request(tmp_path, url="http://127.0.0.1:2")) == first
    assert len(stub.asked()) == 1


def test_a_crashed_run_resumes_from_its_predictions(tmp_path: Path, stub: Stub) -> None:
    stub.crash.write_text("out of luck")
    with pytest.raises(HarnessError, match=r"status 3.*out of luck"):
        run(request(tmp_path))
    assert not (tmp_path / "seed0/result.json").exists()
    assert run(request(tmp_path, url="http://127.0.0.1:2"))["seed"] == 0
    assert stub.asked() == [[False, "http://127.0.0.1:1/v1"], [True, "http://127.0.0.1:2/v1"]]


def test_other_settings_do_not_continue_a_run(tmp_path: Path, stub: Stub) -> None:
    run(request(tmp_path))
    for changes, name in (
        ({"limit": 2}, "limit"),
        ({"settings": model_settings("qwen3-8B").overridden(max_tokens=8)}, "generation_config.max_tokens"),
        ({"server": {"env": {"SGLANG_OSCAR_V_CLIP_RATIO": "0.96"}}}, "server.env.SGLANG_OSCAR_V_CLIP_RATIO"),
    ):
        with pytest.raises(HarnessError, match=f"was begun with {name} ="):
            run(request(tmp_path, **changes))
    assert len(stub.asked()) == 1


def test_sampling_is_the_models(tmp_path: Path) -> None:
    generation = task_config(request(tmp_path, seed=4))["generation_config"]
    assert (generation["temperature"], generation["top_p"], generation["seed"]) == (0.6, 0.95, 4)
    assert generation["extra_body"] == {"top_k": 20}
    assert generation["max_tokens"] == 32768
    long = request(tmp_path, benchmark=BENCHMARKS["lcb_v6_128k"], settings=model_settings("GLM-4.7"), local=None)
    config = task_config(long)
    assert config["generation_config"]["max_tokens"] == 131072
    assert config["generation_config"]["temperature"] == 1.0
    assert config["dataset_args"]["live_code_bench"]["subset_list"] == ["v6"]
    assert config["dataset_hub"] == "huggingface"


@pytest.mark.parametrize("name", ROWS)
def test_local_copies_must_have_the_columns_of_the_real_data(tmp_path: Path, name: str) -> None:
    good = write_rows(tmp_path / "good.jsonl", ROWS[name]())
    config = task_config(request(tmp_path, benchmark=BENCHMARKS[name], local=good))
    staged = Path(config["dataset_args"][BENCHMARKS[name].task]["local_path"])
    assert not staged.exists()
    assert stage(request(tmp_path, benchmark=BENCHMARKS[name], local=good)) == staged
    rows = parquet.read_table(staged / f"{BENCHMARKS[name].split}.parquet").to_pylist()
    columns = BENCHMARKS[name].columns
    assert rows == [{column: row[column] for column in columns} for row in ROWS[name]()]
    column = BENCHMARKS[name].columns[0]
    bad = write_rows(tmp_path / "bad.jsonl", [{k: v for k, v in row.items() if k != column} for row in ROWS[name]()])
    with pytest.raises(DataError, match=f"row 1 lacks '{column}'"):
        stage(request(tmp_path, benchmark=BENCHMARKS[name], local=bad))


def test_reviews_may_hold_any_character(tmp_path: Path) -> None:
    """A line of JSON ends at a line feed only, whatever a model answered."""
    reviews = tmp_path / "seed0/reviews/model"
    reviews.mkdir(parents=True)
    score = {"value": {"acc": 1.0}, "main_score_name": "acc", "prediction": "The answer\u2028is\u2029B\x85."}
    rows = [{"index": index, "sample_score": {"score": score}} for index in range(2)]
    (reviews / "set_default.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert read_result(request(tmp_path))["scores"] == {"set_default/0": 1.0, "set_default/1": 1.0}


def test_a_gated_data_set_is_explained(tmp_path: Path, stub: Stub) -> None:
    stub.crash.write_text(
        "datasets.exceptions.DatasetNotFoundError: Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub."
    )
    with pytest.raises(DataError, match=r"Idavidrein/gpqa: access is restricted.*hf auth login.*EVAL_DATA"):
        run(request(tmp_path, benchmark=BENCHMARKS["gpqa"], local=None))


def test_a_server_that_is_gone_is_no_missing_data_set(tmp_path: Path, stub: Stub) -> None:
    stub.crash.write_text("openai.APIConnectionError: Connection error.")
    with pytest.raises(HarnessError, match=r"ends with: openai\.APIConnectionError"):
        run(request(tmp_path, benchmark=BENCHMARKS["gpqa"], local=None))


def test_local_data_are_named_one_by_one() -> None:
    with pytest.raises(typer.BadParameter, match="'humaneval' is not name=path"):
        local_data("gpqa=a.jsonl,humaneval")
    with pytest.raises(ValueError, match="'WikiText' is not name=path"):
        local_data_sets("GPQA=a.jsonl,WikiText", "GPQA")


def test_a_missing_harness_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("OSCAR_HARNESS_PYTHON", str(python))
    with pytest.raises(HarnessError, match=r"pip install 'sglang-oscar\[eval\]'"):
        check_harness()


def test_a_plan_runs_what_is_missing_only(tmp_path: Path, stub: Stub) -> None:
    settings = model_settings("qwen3-8B")
    data = {name: write_rows(tmp_path / f"{name}.jsonl", ROWS[name]()) for name in ("gpqa", "aime25")}
    evaluation = Evaluation(
        settings, tmp_path / "out", ("gpqa", "aime25"), (make_method("bf16", settings),), (0, 1), data, running=RUNNING
    )
    stub.crash.write_text("killed")
    with pytest.raises(HarnessError, match="killed"):
        evaluate(evaluation)
    said: list[str] = []
    evaluate(evaluation, said.append)
    assert said[0] == "BF16: 0 runs done, 4 to do"
    assert len(stub.asked()) == 5
    evaluate(evaluation, said.append)
    assert said[-1] == "BF16: 4 runs done, 0 to do"
    assert len(stub.asked()) == 5


def eval_of(url: str, folder: Path, *arguments: str) -> Result:
    data = write_rows(folder / "aime25.jsonl", aime_rows())
    command = ["eval", "qwen3-8B", "--benchmarks", "aime25", "--seeds", "1", "--data", f"aime25={data}", "--url", url]
    return CliRunner().invoke(app, [*command, "--root", str(folder / "root"), *arguments])


def test_a_row_is_called_what_the_server_says(tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "model_files", lambda model: {})
    with answering(server_info()) as url:
        done = eval_of(url, tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert "| BF16 | 16.00 | 33.33 |" in done.output
    assert "BF16: AIME25 seed 0: 33.33 (3 asked, 3 answered, 0 cut off)" in done.output
    with answering(server_info(INT2)) as url:
        done = eval_of(url, tmp_path / "b")
        assert "| INT2, recipe plus | 2.29 | 33.33 |" in done.output
        again = eval_of(url, tmp_path / "c", "--methods", "bf16")
    assert (again.exit_code, "the running server is plus (INT2, recipe plus)" in again.output) == (1, True)
    (written,) = (tmp_path / "b").rglob("results.json")
    assert json.loads(written.read_text())["rows"][0]["server"]["int2"] == INT2
    with answering(server_info(INT2 | {"fingerprint": "cd" * 32})) as url:
        other = eval_of(url, tmp_path / "b")
    assert "was begun with server.facts.int2.fingerprint" in other.output


def test_no_answer_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten answers that were all cut off were a score of 0.00 and exit status 0."""
    monkeypatch.setattr(runner, "model_files", lambda model: {})
    monkeypatch.setenv("OSCAR_HARNESS_PYTHON", str(Stub(tmp_path, "max_tokens").python))
    with answering(server_info()) as url:
        done = eval_of(url, tmp_path)
    assert done.exit_code == 1
    assert "| BF16 | 16.00 | no answer |" in done.output
    assert "error: BF16, AIME25: all answers were cut off: this is no score; raise --max-tokens" in done.output
    assert "33.33" not in done.output


def test_how_answers_end(tmp_path: Path) -> None:
    folder = tmp_path / "predictions/model"
    folder.mkdir(parents=True)
    thought = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": ""}]
    ends = [("stop", "yes"), ("stop", ""), ("max_tokens", "so long\u2028"), ("stop", thought), ("tool_calls", "f")]
    ends += [("model_length", "half"), ("length", "half")]
    rows = [
        {"index": i, "model_output": {"choices": [{"stop_reason": reason, "message": {"content": content}}]}}
        for i, (reason, content) in enumerate(ends)
    ]
    rows += [rows[0], {"index": 7, "model_output": {"choices": []}}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "set_default.jsonl").write_text(text, encoding="utf-8")
    answers = count(tmp_path, 8)
    assert (answers.asked, answers.answered, answers.cut_off) == (8, 2, 3)
    assert Answers(100, 99, 1).warning is None
    assert Answers(100, 98, 2).warning is not None
    assert "none was answered (3 asked, 0 answered, 1 cut off)" in (Answers(3, 0, 1).warning or "")
