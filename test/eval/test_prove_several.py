"""Several servers of ``oscar prove`` at the same time: BF16 answers first, faults stay with their cache, no server is
left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from oscar_rotation.model_table import model_settings
from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove import options, run
from oscar_tools.evaluation.prove.asking import AskingError
from oscar_tools.evaluation.prove.caches import Cache
from oscar_tools.evaluation.prove.measures.base import Measure
from oscar_tools.evaluation.prove.options import CacheOptions
from oscar_tools.evaluation.prove.run import Proof, ProveError, Prover
from oscar_tools.evaluation.prove.several import ask_all
from oscar_tools.evaluation.prove.store import Store
from oscar_tools.evaluation.server_facts import read
from oscar_tools.local_server import ServerFailedError
from support.server_answers import server_info

LONG = 20.0
"""Seconds until a test that hangs is given up."""


class Server:
    """A server that is asked by calling it."""

    def __init__(self, name: str, log: Path) -> None:
        self.url, self.log, self.stopped = f"http://127.0.0.1:1/{name}", log, threading.Event()

    def healthy(self) -> bool:
        return not self.stopped.is_set()

    def stop(self) -> None:
        self.stopped.set()


class Machine:
    """Starts servers, and keeps which run."""

    def __init__(self, broken: Sequence[str] = ()) -> None:
        self.broken, self.running, self.asked = broken, {}, []  # type: ignore[var-annotated]
        self.timeouts: list[float] = []
        self.most = 0

    @contextmanager
    def serve(self, model: Any, log: Path, args: Any, env: Any, timeout: float, given_up: Any) -> Iterator[Server]:
        name = log.stem.removeprefix("server_")
        self.timeouts.append(timeout)
        log.write_text("ValueError: no\n")
        if name in self.broken:
            raise ServerFailedError("the server ended with status 1; end of log")
        self.running[name] = server = Server(name, log)
        self.most = max(self.most, len(self.running))
        try:
            yield server
        finally:
            server.stop()
            del self.running[name]


class Asked(Measure):
    """One question, which a function answers."""

    name, title = "asked", "Asked"

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer

    def settings(self) -> dict[str, Any]:
        return {}

    def units(self) -> list[str]:
        return ["0"]

    def ask(self, client: Any, unit: str, cell: Any, reference: Any) -> dict[str, Any]:
        return {"said": self.answer(client.url.rsplit("/")[-1])}

    def longest(self) -> int:
        return 1000

    def figures(self, answers: Any, reference: Any) -> dict[str, Any]:
        return {}


class Later(Asked):
    """Another measure."""

    name, title = "later", "Later"


def prover(
    folder: Path, machine: Machine, patch: pytest.MonkeyPatch, answer: Callable[[str], Any], *more: Measure
) -> Prover:
    patch.setattr(run, "serve", machine.serve)
    patch.setattr(run, "ask", lambda url: read(server_info()))
    patch.setattr(run.Client, "capacity", lambda self: None)
    proof = Proof(model_settings("m"), [Asked(answer), *more], Store(folder), folder, {}, 1, 3)
    return Prover(proof, lambda text: None)


def makers(*names: str) -> dict[str, Callable[[], Cache]]:
    return {name: lambda name=name: Cache(name, name, False, (), {}) for name in ("bf16", *names)}  # type: ignore[misc]


def test_others_start_beside_bf16_and_are_asked_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, order = Machine(), []

    def answer(name: str) -> str:
        while name == "bf16" and len(machine.running) < 3:
            pass
        order.append(name)
        return name

    made = prover(tmp_path, machine, monkeypatch, answer)
    caches = ask_all(made, makers("a", "b", "c", "d"))
    assert [cache.name for cache in caches] == ["bf16", "a", "b", "c", "d"]
    assert order[0] == "bf16"
    assert machine.most == 3
    assert {name: cells["asked"].done["0"]["said"] for name, cells in made.outcome.cells.items()} == {
        name: name for name in ("bf16", "a", "b", "c", "d")
    }
    assert min(machine.timeouts) > run.start_timeout()


def test_a_measure_waits_for_bf16_in_that_measure_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def first(name: str) -> str:
        if name == "a":
            answered.set()
        return name

    def second(name: str) -> bool:
        return name == "bf16" and answered.wait(LONG)

    made = prover(tmp_path, Machine(), monkeypatch, first, Later(second))
    ask_all(made, makers("a"))
    assert made.outcome.cells["bf16"]["later"].done["0"]["said"]


def test_a_fault_of_one_cache_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str) -> str:
        if name == "b":
            raise AskingError("no answer")
        return name

    def unmade() -> Cache:
        raise DataError("cannot be fitted\nmore")

    def too_large() -> Cache:
        raise torch.OutOfMemoryError

    made = prover(tmp_path, Machine(["a"]), monkeypatch, answer)
    ask_all(made, makers("a", "b") | {"c": unmade, "e": too_large} | makers("d"))
    assert made.outcome.failed
    assert [text.split(":")[0] for text in sorted(made.outcome.remarks)] == ["a", "b, Asked", "c", "e"]
    assert made.outcome.cells["d"]["asked"].done


def test_without_bf16_all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(["bf16"])
    with pytest.raises(ProveError, match=r"^bf16: left out, the server ended with status 1: ValueError: no "):
        ask_all(prover(tmp_path, machine, monkeypatch, str), makers("a", "b", "c"))
    assert not machine.running


def test_an_interruption_ends_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    servers: list[Server] = []

    def hang(name: str) -> None:
        machine.running[name].stopped.wait(LONG)
        raise AskingError("no answer from the server")

    def interrupted() -> Cache:
        while len(machine.running) < 3:
            pass
        servers.extend(machine.running.values())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all(prover(tmp_path, machine, monkeypatch, hang), makers("a", "b", "c") | {"d": interrupted})
    assert not machine.running
    assert len(servers) == 3
    assert all(server.stopped.is_set() for server in servers)


def test_servers_that_share_a_gpu_say_how_much_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CacheOptions(servers=2)
    asked.check_memory(())
    monkeypatch.setattr(options, "has_gpu", lambda: True)
    with pytest.raises(typer.BadParameter, match="2 servers on one GPU need a limit of memory each, such as"):
        asked.check_memory(("--mem-fraction-static", "0.45"))
    asked.check_memory(("--max-total-tokens=200000",))
    CacheOptions().check_memory(())
