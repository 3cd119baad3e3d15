"""Finished runs count only for the settings that they were made with: questions, model, rotations, flags, data."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_harness_runs import Stub, stub

from oscar_rotation.model_table import model_settings
from oscar_tools.calibration.errors import DataError, HarnessError
from oscar_tools.evaluation import runner
from oscar_tools.evaluation.methods import make_method
from oscar_tools.evaluation.runner import Evaluation, evaluate
from oscar_tools.evaluation.server_facts import read
from support.benchmark_data import ROWS, write_rows
from support.server_answers import INT2, server_info

__all__ = ["stub"]
FILES = ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt")


def rotations(folder: Path, content: bytes = b"fitted") -> Path:
    """Two files; a running server is asked, so nobody reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of methods are named, not started, and say what they are."""
    monkeypatch.setattr(
        runner, "method_server", lambda evaluation, method: nullcontext(SimpleNamespace(url="http://x"))
    )
    monkeypatch.setattr(runner, "ask", lambda url: read(server_info(INT2)))


def make_evaluation(tmp_path: Path, model: str = "qwen3-8B", file_clips: bool = False, **more: Any) -> Evaluation:
    """OSCAR of a model with its own ROT_DIR, which lies beside those of others."""
    settings = model_settings(model)
    folder = tmp_path / "zoo" / Path(model).name
    method = make_method("oscar", settings, folder if folder.exists() else rotations(folder), file_clips=file_clips)
    data = tmp_path / "aime25.jsonl"
    local = {"aime25": data if data.exists() else write_rows(data, ROWS["aime25"]())}
    evaluation = Evaluation(settings, tmp_path / "zoo", ("aime25",), (method,), (0,), local)
    return replace(evaluation, **more)


def refused(evaluation: Evaluation, what: str) -> str:
    with pytest.raises(HarnessError, match=what) as caught:
        evaluate(evaluation, lambda _: None)
    text = str(caught.value)
    assert "\n" not in text
    assert "remove the folder to run it anew, or use another one (OSCAR_ROOT, or a ROT_DIR elsewhere)" in text
    return text


def test_a_finished_run_is_not_one_of_other_settings(tmp_path: Path, stub: Stub) -> None:
    first = make_evaluation(tmp_path, limit=2)
    evaluate(first, lambda _: None)
    assert len(stub.asked()) == 1
    text = refused(make_evaluation(tmp_path), r"seed0: was begun with limit = 2, now it is unset")
    assert str(tmp_path / "zoo/_eval_aime25_oscar/seed0") in text
    refused(replace(first, settings=first.settings.overridden(max_tokens=8)), r"generation_config\.max_tokens = 32768")
    refused(replace(first, server_args=("--page-size", "64")), r"server\.args = ")
    refused(
        make_evaluation(tmp_path, file_clips=True, limit=2),
        r"server\.env\.SGLANG_OSCAR_K_CLIP_RATIO = .*now it is unset",
    )
    other = make_evaluation(tmp_path, "qwen3-32B", limit=2)
    refused(other, r'was begun with model = "Qwen/Qwen3-8B", now it is "Qwen/Qwen3-32B"')
    assert len(stub.asked()) == 1
    said: list[str] = []
    evaluate(first, said.append)
    assert said == ["OSCAR: 1 runs done, 0 to do"]


def test_rotations_data_and_weights_count_by_content(tmp_path: Path, stub: Stub) -> None:
    model = tmp_path / "checkpoint"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    evaluation = make_evaluation(tmp_path, str(model))
    evaluate(evaluation, lambda _: None)
    copy = rotations(tmp_path / "elsewhere")
    moved = replace(evaluation, methods=(make_method("oscar", evaluation.settings, copy),))
    evaluate(moved, lambda _: None)
    rotations(copy, b"fitted anew")
    refused(moved, r"server\.env\.SGLANG_OSCAR_K_ROTATION_PATH = ")
    data = evaluation.local["aime25"].read_bytes()
    evaluation.local["aime25"].write_bytes(data + data)
    refused(evaluation, r"server\.data = ")
    evaluation.local["aime25"].write_bytes(data)
    (model / "model.safetensors").write_bytes(b"trained")
    refused(make_evaluation(tmp_path, str(model)), r"server\.model\.weights\.model\.safetensors = ")
    assert len(stub.asked()) == 1
    evaluation.local["aime25"].unlink()
    with pytest.raises(DataError, match="no such file"):
        evaluate(evaluation, lambda _: None)


def test_a_seed_that_is_not_asked_for_is_in_the_table_too(tmp_path: Path, stub: Stub) -> None:
    evaluate(make_evaluation(tmp_path, seeds=(1,), limit=2), lambda _: None)
    refused(make_evaluation(tmp_path), r"seed1: was begun with limit = 2")
    assert len(stub.asked()) == 1


def test_results_may_be_moved_and_asked_for_faster(tmp_path: Path, stub: Stub) -> None:
    evaluation = make_evaluation(tmp_path)
    evaluate(evaluation, lambda _: None)
    shutil.move(tmp_path / "zoo", tmp_path / "moved")
    settings = evaluation.settings.overridden(concurrency=evaluation.settings.concurrency + 1)
    method = make_method("oscar", settings, tmp_path / "moved/qwen3-8B")
    evaluate(replace(evaluation, settings=settings, folder=tmp_path / "moved", methods=(method,)), lambda _: None)
    assert len(stub.asked()) == 1


def test_runs_that_do_not_say_their_settings_do_not_count(tmp_path: Path, stub: Stub) -> None:
    evaluation = make_evaluation(tmp_path)
    evaluate(evaluation, lambda _: None)
    task = tmp_path / "zoo/_eval_aime25_oscar/seed0/task.json"
    whole = json.loads(task.read_text())
    task.write_text(json.dumps({name: value for name, value in whole.items() if name != "server"}))
    refused(evaluation, "is of a release that did not note rotations, clip ratios and flags of the server")
    task.unlink()
    refused(evaluation, "does not say of which settings its run is")
    assert len(stub.asked()) == 1


def test_where_nothing_has_begun_any_settings_do(tmp_path: Path, stub: Stub) -> None:
    evaluation = make_evaluation(tmp_path)
    folder = evaluation.run_folder("aime25", "oscar", 0)
    folder.mkdir(parents=True)
    (folder / "task.json").write_text('{"limit": 7}')
    evaluate(evaluation, lambda _: None)
    assert len(stub.asked()) == 1
