"""A server that calibrates itself: ``--kv-cache-dtype int2`` and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_oscar.errors import EXIT_CODE
from support.launch_cases import run_cases
from support.reference import MODEL, document
from support.servers import Server, serve, server_environment

pytestmark = pytest.mark.server
INT2 = ["--kv-cache-dtype", "int2", "--speculative-algorithm", "NGRAM"]
"""Drafts, which a recording does not take."""


def answer(server: Server) -> tuple[dict[str, Any], list[int]]:
    """What a server says of its rotations, and what it goes on with behind some text."""
    facts = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["oscar"]
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


def test_calibrate_beforehand_on_ones_own_text(tmp_path: Path) -> None:
    """``oscar calibrate`` writes where a server looks; another text takes the place of the one before."""
    text = tmp_path / "own.jsonl"
    rows = [{"text": document(450, 40 + seed, facts=1).text} for seed in range(4)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = {"SGLANG_OSCAR_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "oscar_tools", "calibrate", str(MODEL), "--text", str(text), "--tokens", "1200"]
    command += ["--mem-fraction-static", "0.2"]
    done = subprocess.run(
        command, env=server_environment(cache), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    folder = Path(done.stdout.splitlines()[-1].removeprefix("rotations: "))
    assert json.loads((folder / "calibration.json").read_text())["text"] == str(text)
    argv = ["--model-path", str(MODEL), "--device", "cpu", "--kv-cache-dtype", "int2"]
    forbidden = cache | {"SGLANG_OSCAR_CALIBRATE": "0"}
    (outcome,) = run_cases([{"argv": argv}], server_environment(forbidden))
    assert outcome["status"] == 0, outcome
    assert f"rotations from the cache: {folder}/k_rotation" in outcome["error"]
