"""What is hooked where: a launching process tells its workers whether int2 mode is asked for."""

from __future__ import annotations

import multiprocessing
import sys

import pytest

from sglang_oscar.attach import processes


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processes.MARK, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", object)


def test_one_server_in_int2_mode_is_enough(worker: None) -> None:
    """Whatever servers a process launches beside it, before or after. Without a word, int2 mode is possible."""
    assert processes.may_serve_int2()
    processes.declare(False)
    assert not processes.may_serve_int2()
    processes.declare(True)
    assert processes.may_serve_int2()
    processes.declare(False)
    assert processes.may_serve_int2()


def test_a_launching_process_forgets_what_another_one_said(worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.declare(False)
    processes.begin()
    assert not processes.may_serve_int2(), "a worker must not forget"
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    processes.begin()
    assert processes.may_serve_int2()


def test_a_worker_with_a_scheduler_schedules(worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, processes.SCHEDULER, raising=False)
    assert not processes.schedules()
    monkeypatch.setitem(sys.modules, processes.SCHEDULER, sys)
    assert processes.schedules()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    assert not processes.schedules(), "a process that launches servers imports it, too"


@pytest.mark.parametrize(
    ("caller", "launches"), [(processes.SCHEDULER, False), ("sglang.srt.entrypoints.engine", True)]
)
def test_a_child_of_a_trainer_launches(
    caller: str, launches: bool, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has plugins loaded tells it from a worker: both are children, and both have imported the scheduler."""
    monkeypatch.setitem(sys.modules, processes.SCHEDULER, sys)
    found = {"__name__": caller, "asked": lambda: (processes.begin(), processes.schedules())}
    exec("def load_plugins():\n    return asked()", found)
    plugins = {"__name__": caller, "load_plugins": found["load_plugins"]}
    exec("def launch():\n    return load_plugins()", plugins)
    processes.declare(False)
    assert plugins["launch"]()[1] is not launches
    assert processes.may_serve_int2() is launches, "it forgets what its parent said of another server"


@pytest.mark.parametrize(("caller", "found"), [(processes.DETOKENIZER, True), (processes.SCHEDULER, False)])
def test_a_detokenizer_is_told_by_who_loads_plugins(
    caller: str, found: bool, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone; a process that launches servers is not, whoever loads plugins there."""
    loader = {"asked": processes.detokenizes}
    exec("def load_plugins():\n    return asked()", loader)
    plugins = {"__name__": caller, "load_plugins": loader["load_plugins"]}
    exec("def run():\n    return load_plugins()", plugins)
    assert plugins["run"]() is found
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    assert not plugins["run"]()
