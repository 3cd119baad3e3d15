"""The script that measures all tables: its commands are ones that the benchmarks take, and a run can go on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmark" / "run.sh"
FAKE = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
for last; do :; done
echo '{}' > "$last"
case "$*" in *store_k3v2*) exit 1 ;; *"${KILLED:-nothing}"*) kill -9 "$PPID" ;; esac
"""


def run(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script with an interpreter that writes down what it is asked, and fails in one measurement."""
    fake = folder / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    env = os.environ | {"PYTHON": str(fake), "CALLS": str(folder / "calls"), "OUT": str(folder / "out")} | env
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=600, check=False
    )


def commands(text: str) -> list[list[str]]:
    """The command lines, without the interpreter."""
    return [shlex.split(line)[1:] for line in text.splitlines()]


def test_benchmarks_take_the_commands(tmp_path: Path) -> None:
    listed = commands(run(tmp_path, "--list", SERVER_ARGS="--page-size 64 --x").stdout)
    assert not (tmp_path / "calls").exists()
    scripts = {script for script, *_ in listed}
    assert len(listed) > 20
    for line in listed:
        if line[0].startswith("benchmark/serving"):
            assert any(word.endswith("--page-size 64 --x") for word in line)
    assert {"benchmark/serving/bench_paper.py", "benchmark/kernels/bench_decode.py"} <= scripts
    for script, *arguments in listed:
        source = (ROOT / script).read_text(encoding="utf-8")
        for flag in (argument for argument in arguments if re.fullmatch(r"--\S+", argument)):
            name = re.escape(flag.removeprefix("--").replace("-", "_"))
            assert re.search(rf"^ +{name}: |\"{flag}\"", source, re.MULTILINE), f"{script} has no {flag}"


def test_a_run_goes_on(tmp_path: Path) -> None:
    first = run(tmp_path, "kernels")
    assert first.returncode == 1
    assert "failed: kernels_store_k3v2" in first.stderr
    out = tmp_path / "out"
    assert (out / "kernels_store.json").is_file()
    assert (out / "kernels_store_k3v2.part.json").is_file()
    asked = len((tmp_path / "calls").read_text().splitlines())
    assert run(tmp_path, "kernels").stdout.count("there already") == asked - 1
    assert len((tmp_path / "calls").read_text().splitlines()) == asked + 1


def test_what_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    assert run(tmp_path, "kernels", KILLED="bench_extend").returncode == -signal.SIGKILL
    out = tmp_path / "out"
    assert (out / "kernels_extend.part.json").is_file()
    assert not (out / "kernels_extend.json").exists()
    run(tmp_path, "kernels")
    assert (out / "kernels_extend.json").is_file()


def test_unknown_parts(tmp_path: Path) -> None:
    done = run(tmp_path, "kernel")
    assert done.returncode == 1
    assert "no part is named kernel; there are: kernels" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "kernels", OUT="")
    assert done.returncode == 1
    assert "nvidia-smi names no GPU" in done.stderr
    assert not (tmp_path / "calls").exists()
