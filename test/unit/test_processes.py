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
