"""``oscar run`` hands a program of SGLang its arguments, after plugins are loaded."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from oscar_tools import run_program
from oscar_tools.cli import app
from sglang_oscar import plugin
from sglang_oscar.errors import Int2Error


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order; plugins are not loaded into this process."""
    happened: list[Any] = []
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: happened.append("plugins"))
    monkeypatch.setattr(plugin, "hook_models", lambda args: happened.append(("hooks", args.kv_cache_dtype)))
    monkeypatch.setattr(run_program, "_stock", {})
    monkeypatch.setattr(sys, "argv", ["oscar"])
    return happened


def test_a_program_gets_its_arguments(order: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = ModuleType("sglang_program")
    program.cli_main = lambda: order.append(sys.argv)
    monkeypatch.setitem(sys.modules, "sglang_program", program)
    monkeypatch.delitem(sys.modules, run_program.ONE_BATCH, raising=False)
    done = CliRunner().invoke(app, ["run", "sglang_program", "--help", "--batch-size", "1", "2", "--", "x"])
    assert done.exit_code == 0, done.output
    assert order == ["plugins", ["sglang_program", "--help", "--batch-size", "1", "2", "--", "x"]]


def test_a_model_without_a_scheduler_is_hooked_first(order: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = ModuleType(run_program.ONE_BATCH)
    args = SimpleNamespace(kv_cache_dtype="int2")
    program.latency_test = lambda server_args, rank: order.append(("latency", server_args is args, rank))
    program.correctness_test = None
    program.cli_main = lambda: program.latency_test(args, 1)
    monkeypatch.setitem(sys.modules, run_program.ONE_BATCH, program)
    done = CliRunner().invoke(app, ["run", run_program.ONE_BATCH])
    assert done.exit_code == 0, done.output
    assert order == ["plugins", "plugins", ("hooks", "int2"), ("latency", True, 1)]


def test_what_cannot_run_is_one_line(order: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise Int2Error("no")

    program: Any = ModuleType("sglang_program")
    program.cli_main = refused
    monkeypatch.setitem(sys.modules, "sglang_program", program)
    wrong = (("sglang.nowhere", "No module named"), ("json", "has no function cli_main"), ("sglang_program", "no"))
    for module, what in wrong:
        done = CliRunner().invoke(app, ["run", module])
        assert done.exit_code == 78
        assert what in done.stderr
        assert done.stderr.count("\n") == 1
