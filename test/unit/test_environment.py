"""Pins of the oldest and the newest release, and what scripts/environment.sh says where it has none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_oscar import SGLANG_VERSIONS

SCRIPTS = Path(__file__).parents[2] / "scripts"
PINS = sorted((SCRIPTS / "constraints").iterdir())
NAME = re.compile(r"sglang([0-9.]+)-python(3\.\d+)\.txt")


def releases() -> dict[str, list[str]]:
    """Pythons by release, as the names of the files with pins say."""
    found: dict[str, list[str]] = {}
    for release, python in NAME.findall("\n".join(path.name for path in PINS)):
        found.setdefault(release, []).append(python)
    return found


def test_the_oldest_and_the_newest_release_have_pins() -> None:
    assert list(releases()) == [SGLANG_VERSIONS[0], SGLANG_VERSIONS[-1]]


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.name)
def test_pins_are_of_their_release(path: Path) -> None:
    release, _ = NAME.fullmatch(path.name).groups()
    lines = path.read_text().splitlines()
    assert f"sglang=={release}" in lines
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^ ]+", line) for line in lines)


def environment(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """What the script says and leaves behind; nothing may be made."""
    env = os.environ | {"OSCAR_VENV": str(tmp_path / "venv")} | variables
    command = [
        shutil.which("bash") or "bash",
        "-c",
        f"set -euo pipefail; source '{SCRIPTS / 'environment.sh'}'; echo made",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert not (tmp_path / "venv").exists()
    return done


@pytest.mark.parametrize("release", ["0.5.19", "0.5", ".*", "newest"])
def test_a_release_without_pins_is_one_line(release: str, tmp_path: Path) -> None:
    done = environment(tmp_path, SGLANG=release)
    assert done.returncode != 0
    assert done.stderr == f"error: SGLANG={release} has no pins; choose one of: {' '.join(releases())}\n"
    assert done.stdout == ""


@pytest.mark.parametrize("release", releases())
def test_a_python_that_a_release_does_not_take_is_one_line(release: str, tmp_path: Path) -> None:
    old = program(tmp_path / "python", "echo 3.9")
    done = environment(tmp_path, SGLANG=release, PYTHON=str(old))
    assert done.returncode != 0
    wanted = " or ".join(releases()[release])
    assert done.stderr == f"error: SGLang {release} needs Python {wanted}, and {old} is not; set PYTHON to one\n"
    assert done.stdout == ""


def program(path: Path, text: str) -> Path:
    """A program of this text of a shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def with_room(tmp_path: Path, gigabytes: int) -> str:
    """A PATH on which every disk has this much left."""
    df = program(tmp_path / "bin" / "df", f"printf 'Avail\\n    {gigabytes}\\n'")
    return f"{df.parent}:{os.environ['PATH']}"


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "echo 3.11")
    done = environment(tmp_path, SGLANG="0.5.17", PYTHON=str(python), PATH=with_room(tmp_path, 3))
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: {tmp_path / 'venv'} takes 9 to 11 GB, and its disk has 3 GB left; make room")
    assert done.stdout == ""


def made_with(python: str, tmp_path: Path, venv: Path) -> subprocess.CompletedProcess:
    """The script with an interpreter that is this text of a shell, on a disk with room."""
    fake = program(tmp_path / "python", python)
    env = os.environ | {"OSCAR_VENV": str(venv), "PYTHON": str(fake), "PATH": with_room(tmp_path, 100)}
    script = f"set -euo pipefail; source '{SCRIPTS / 'environment.sh'}'; echo made"
    return subprocess.run([shutil.which("bash") or "bash", "-c", script], env=env, capture_output=True, text=True,
                          timeout=300, check=False, cwd=tmp_path)  # fmt: skip


STOPS = 'case "$1" in -c) echo 3.11;; *) echo stopped >&2; exit 3;; esac'
"""An interpreter that makes no environment."""


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    venv = tmp_path / "precious"
    venv.mkdir()
    (venv / "thesis.txt").write_text("years of work")
    done = made_with(STOPS, tmp_path, venv)
    assert done.returncode != 0
    assert done.stderr == (
        f"error: {venv} is not empty and no environment that this script made; remove it, or set OSCAR_VENV to a new "
        "folder\n"
    )
    assert (venv / "thesis.txt").read_text() == "years of work"


def test_an_unfinished_environment_is_made_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    for _ in range(2):
        done = made_with(STOPS, tmp_path, venv)
        assert done.returncode == 3, done.stderr
        assert "stopped" in done.stderr
    assert [path.name for path in venv.iterdir()] == [".oscar-begun"]


def test_scripts_take_paths_from_where_they_are_called() -> None:
    text = (SCRIPTS / "environment.sh").read_text()
    assert not re.search(r"^\s*cd ", text, re.MULTILINE)
    for name in ("quickstart.sh", "real_model.sh"):
        assert 'exec python "$root/scripts/' in (SCRIPTS / name).read_text()
