"""Commands of docs/measuring.md name modules, commands and options that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer
from sglang.srt.server_args import ServerArgs

from oscar_tools.cli import app
from oscar_tools.evaluation.benchmarks import BENCHMARKS
from sglang_oscar.attach import releases

PAGE = Path(__file__).parents[2] / "docs" / "measuring.md"
LINES = re.findall(r"^ {4}(.+)$", PAGE.read_text().replace("\\\n", " "), re.MULTILINE)
OURS = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("oscar ")]
SGLANG = [shlex.split(line, comments=True)[2:] for line in LINES if line.startswith("python -m sglang.")]


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_our_commands(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    assert flags(words) <= {option for parameter in command.params for option in parameter.opts}
    if "--benchmarks" in words:
        assert set(words[words.index("--benchmarks") + 1].split(",")) <= set(BENCHMARKS)


@pytest.mark.parametrize("words", SGLANG, ids=" ".join)
def test_programs_of_sglang(words: list[str]) -> None:
    found = importlib.util.find_spec(words[0])
    assert found is not None
    assert found.origin is not None
    known = {f"--{name.replace('_', '-')}" for name in releases.field_defaults(ServerArgs)}
    if words[0] != "sglang.launch_server":
        known = set(re.findall(r"\"(--[a-z0-9-]+)\"", Path(found.origin).read_text()))
    assert flags(words) <= known


def test_there_are_commands() -> None:
    assert len(OURS) == len(SGLANG) == 3
