"""scripts/next_release.sh: a release that is not supported is fetched, tested and reported."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from support.releases import tree  # its folder is that of next_release, too

import next_release  # isort: skip

SCRIPT = Path(next_release.__file__).with_suffix(".sh")


def wheel(folder: Path, name: str = "sglang-9.9.9rc1-py3-none-any.whl") -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/srt/server_args.py", "class ServerArgs: ...")
        archive.writestr("sglang/kernels.so", "")
    return path


def test_sources_of_a_wheel_lie_where_tests_of_releases_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_RELEASES", str(tmp_path / "releases"))
    for _ in range(2):  # a wheel may be built anew under one version
        assert next_release.unpack(next_release.wheel_of(str(wheel(tmp_path)), tmp_path)) == "9.9.9rc1"
        found = tree("9.9.9rc1")
        assert (found / "sglang/srt/server_args.py").read_text() == "class ServerArgs: ..."
        assert not (found / "sglang/kernels.so").exists()
        (found / "stale.py").touch()
    assert next_release.unpack(wheel(tmp_path)) == "9.9.9rc1"
    assert not (found / "stale.py").exists()


def test_what_is_no_wheel_of_sglang(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        next_release.wheel_of(str(tmp_path / "none.whl"), tmp_path)
    assert str(caught.value).endswith("none.whl: no such file")
    with pytest.raises(SystemExit) as caught:
        next_release.unpack(wheel(tmp_path, "vllm-1.0-py3-none-any.whl"))
    assert str(caught.value) == "error: vllm-1.0-py3-none-any.whl is no wheel of sglang"


def test_the_report_has_a_line_for_every_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase name="test_imports[9.9.9]"/>
        <testcase name="test_touchpoints[9.9.9]"><failure message="AssertionError: gone: a, b&#10;assert"/></testcase>
        <testcase name="test_int2_answers[9.9.9]"><error message="boom"/></testcase>
        <testcase name="test_command_lines[9.9.9]"><skipped/></testcase>
        </testsuite></testsuites>"""
    )
    assert next_release.moved(report) == (3, ["touchpoints: gone: a, b", "int2 answers: boom"])


def said(*args: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(["bash", str(SCRIPT), *args], env=os.environ | variables, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    return done.returncode, done.stderr


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    assert said() == (2, "usage: bash scripts/next_release.sh VERSION or WHEEL.whl\n")
    (tmp_path / "thesis.txt").write_text("years of work")
    code, text = said("9.9.9", OSCAR_VENV=str(tmp_path))
    assert (code, text.count("\n")) == (1, 1)
    assert "no environment that this script made" in text
    assert (tmp_path / "thesis.txt").exists()


FAKE = """#!/bin/sh
case "$2" in venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; *) echo "$@" >>"$CALLS";; esac
"""
"""An interpreter that makes environments with itself in them, and otherwise says what it is asked."""


def test_an_environment_of_the_release_is_made_once(tmp_path: Path) -> None:
    fake, calls = tmp_path / "python", tmp_path / "calls"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    chosen = {"PYTHON": str(fake), "OSCAR_VENV": str(tmp_path / "venv"), "CALLS": str(calls)}
    assert said("9.9.9", **chosen) == (0, "")
    first = calls.read_text().splitlines()
    assert [line for line in first if " install " in line and " sglang==9.9.9 " in line]
    assert [line for line in first if line.endswith(f"--no-deps --editable {SCRIPT.parents[1]}")]
    assert first[-1] == f"{SCRIPT.with_suffix('.py')} 9.9.9"
    assert said("9.9.9", **chosen) == (0, "")
    assert calls.read_text().splitlines() == [*first, first[-1]]
    assert said("9.9.10", **chosen) == (0, "")
    assert "sglang==9.9.10" in calls.read_text()
