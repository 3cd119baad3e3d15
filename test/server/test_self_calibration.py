"""A server that calibrates itself: ``--kv-cache-dtype int2`` and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_tools.calibration.calibrate_command import server_arguments
from oscar_tools.doctor.model import model_config
from sglang_oscar.errors import EXIT_CODE
from sglang_oscar.rotation_source.choice import Source, find
from sglang_oscar.settings import Settings
from support import hybrid_models
from support.launch_cases import run_cases
from support.reference import MODEL, document
from support.servers import TWO_CORES, TWO_RANKS, Server, serve, server_environment

pytestmark = pytest.mark.server
INT2 = ["--kv-cache-dtype", "int2", "--speculative-algorithm", "NGRAM"]
"""Drafts, which a recording does not take."""


def answer(server: Server) -> tuple[dict[str, Any], list[int]]:
    """What a server says of its rotations, and what it goes on with behind some text."""
    facts = requests.get(f"{server.url}/server_info", timeout=300).json()["internal_states"][0]["oscar"]
    ids = list(range(100, 600))
    return facts, server.generate(ids, 24)["output_ids"]


def test_the_first_start_calibrates_and_the_second_finds_it(tmp_path: Path) -> None:
    """Both give the same answers; the folder holds what ``oscar inspect`` shows, and no recording."""
    env = {"SGLANG_OSCAR_CACHE": str(tmp_path / "cache")}
    found = []
    for start in ("first", "second"):
        with serve(MODEL, tmp_path / start, *INT2, env=env) as server:
            found.append(answer(server))
    (first, ids), (second, again) = found
    assert first["rotations"]["origin"] == "calibration on the spot"
    assert second["rotations"]["origin"] == "the cache"
    assert first["rotations"]["keys"] == second["rotations"]["keys"]
    assert (first["fingerprint"], ids) == (second["fingerprint"], again)
    assert (first["recipe"], first["codes"]) == ("focus", "keys 3, values 2")
    said = (tmp_path / "first").read_text()
    for line in ("has no rotations yet; making them now", "recording: ", "fitted 4 layers on", "rotations from calib"):
        assert said.count(line) >= 1, line
    assert "making them now" not in (tmp_path / "second").read_text()
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if not path.name.startswith("."))
    assert len(list(folder.iterdir())) == 3
    facts = json.loads((folder / "calibration.json").read_text())
    assert (facts["recipe"], facts["bits"], facts["context"], facts["text"]) == ("focus", "k3v2", 8192, "shipped")
    command = [sys.executable, "-m", "oscar_tools", "inspect", first["rotations"]["keys"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "8,192 positions" in json.loads(done.stdout)["positions"]


def test_starts_that_do_not_calibrate(tmp_path: Path) -> None:
    """One line and nothing left behind: forbidden, too slow, nowhere to write."""
    (tmp_path / "file").touch()
    cases = {
        "forbids to calibrate": {"SGLANG_OSCAR_CALIBRATE": "0"},
        "took longer than 1 s": {"SGLANG_OSCAR_CALIBRATE_SECONDS": "1"},
        "set SGLANG_OSCAR_CACHE": {"SGLANG_OSCAR_CACHE": "", "XDG_CACHE_HOME": str(tmp_path / "file")},
    }
    argv = ["--model-path", str(MODEL), "--device", "cpu", "--kv-cache-dtype", "int2"]
    inputs: list[dict[str, Any]] = []
    for env in cases.values():
        given = {"SGLANG_OSCAR_CACHE": str(tmp_path / "cache")} | env
        inputs.append({"argv": argv, "env": given, "unset": [name for name, value in given.items() if not value]})
    for said, outcome in zip(cases, run_cases(inputs, server_environment({})), strict=True):
        assert outcome["status"] == EXIT_CODE, outcome
        (line,) = (line for line in outcome["error"].splitlines() if line.startswith("sglang-oscar: error: "))
        assert said in line
    left = [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    assert [path.suffix for path in left] == [".log"]


def calibrate(model: Path, text: Path, env: dict[str, str], *flags: str) -> Path:
    """``oscar calibrate`` on a few documents of one's own; returns the folder that it names."""
    rows = [{"text": document(450, 40 + seed, facts=1).text} for seed in range(4)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "oscar_tools", "calibrate", str(model), "--text", str(text), "--tokens", "1200"]
    command += ["--mem-fraction-static", "0.5", *flags]
    done = subprocess.run(
        command, env=server_environment(env), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Path(done.stdout.splitlines()[-1].removeprefix("rotations: "))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks on two CPU cores")
def test_a_hybrid_by_two_ranks(tmp_path: Path) -> None:
    """Layers with an INT2 cache are recorded, by as many ranks as will serve."""
    model = hybrid_models.save("qwen3_next", tmp_path / "model", vocab_size=4096)
    ranks = TWO_RANKS if torch.cuda.is_available() else [*TWO_RANKS, "--device", "cpu"]
    flags = [*ranks, "--tokenizer-path", str(MODEL), "--out", str(model / "oscar")]
    folder = calibrate(model, tmp_path / "own.jsonl", TWO_CORES, *flags)
    assert folder == model / "oscar"
    for path in rotation_files(folder):
        assert read_rotation_file(path).layer_ids == hybrid_models.FULL_LAYERS
    assert find(server_arguments(str(model), []), Settings.from_env({}), model_config(str(model))) == Source(
        *map(str, rotation_files(folder)), "the checkpoint"
    )


def test_calibrate_beforehand_on_ones_own_text(tmp_path: Path) -> None:
    """``oscar calibrate`` writes where a server looks."""
    text, cache = tmp_path / "own.jsonl", {"SGLANG_OSCAR_CACHE": str(tmp_path / "cache")}
    folder = calibrate(MODEL, text, cache)
    assert json.loads((folder / "calibration.json").read_text())["text"] == str(text)
    argv = ["--model-path", str(MODEL), "--device", "cpu", "--kv-cache-dtype", "int2"]
    forbidden = cache | {"SGLANG_OSCAR_CALIBRATE": "0"}
    (outcome,) = run_cases([{"argv": argv}], server_environment(forbidden))
    assert outcome["status"] == 0, outcome
    assert f"rotations from the cache: {folder}/k_rotation" in outcome["error"]
