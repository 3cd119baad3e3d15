"""The run: one server per cache, every measure's units asked of it, answers kept as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.dump_driver import server_environment
from oscar_tools.calibration.errors import HarnessError
from oscar_tools.evaluation.prove.asking import AskingError, Client
from oscar_tools.evaluation.prove.bars import Bars
from oscar_tools.evaluation.prove.caches import BF16, Cache
from oscar_tools.evaluation.prove.measures import Effects, Measure
from oscar_tools.evaluation.prove.store import Cell, Store
from oscar_tools.evaluation.server_facts import ask
from oscar_tools.local_server import LocalServer, ServerFailedError, serve, start_timeout

Cells = dict[str, dict[str, Cell]]
"""Cache -> measure -> answers."""
SERVER = "server"
"""Name of the cell that holds what a cache's server says of itself, and of its only unit."""
SLOWER = 4
"""Several servers on one machine may take so many times longer to start."""


class ProveError(RuntimeError):
    """The run cannot go on; the message is one line. What was answered is kept."""


@dataclass(frozen=True)
class Proof:
    """What to ask.

    Attributes:
        settings: of the model.
        measures: in order.
        store: where answers are kept.
        folder: for server logs.
        depends: what every answer depends on besides cache and measure: model, text, versions, machine.
        at_once: requests in flight.
        servers: that run at the same time.
    """

    settings: ModelSettings
    measures: Sequence[Measure]
    store: Store
    folder: Path
    depends: dict[str, Any]
    at_once: int
    servers: int = 1

    def of(self, cache: Cache) -> Sequence[Measure]:
        """What is asked of a cache."""
        return [measure for measure in self.measures if cache.chunk is None or measure.name == Effects.name]

    def in_flight(self, capacity: int | None, longest: int) -> int:
        """Requests in flight at a server whose cache holds so many tokens: prefixes must live until they are read.

        Args:
            capacity: of the server's cache, in tokens; None if it does not say.
            longest: tokens of the longest prompt.
        """
        return self.at_once if capacity is None else max(1, min(self.at_once, capacity // (2 * longest)))


@dataclass
class Outcome:
    """What became of it.

    Attributes:
        cells: answers.
        servers: cache -> what its server says of itself, in a cell of one unit.
        remarks: what was left out and why, one line each.
        unavailable: why a measure cannot be asked -> titles of the caches.
        failed: whether something that should work did not.
        seconds: cache -> time that its server ran for this run.
    """

    cells: Cells = field(default_factory=dict)
    servers: dict[str, Cell] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    unavailable: dict[str, list[str]] = field(default_factory=dict)
    failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def facts(self, cache: Cache) -> dict[str, Any] | None:
        """What a cache's server says of itself, JSON of :class:`ServerFacts`; None where it could not be asked."""
        return self.servers[cache.name].done.get(SERVER)

    def remark(self, text: str, failed: bool = False) -> None:
        """Note what was left out."""
        if text not in self.remarks:
            self.remarks.append(text)
        self.failed |= failed


def open_cells(proof: Proof, cache: Cache, reference: dict[str, Cell] | None) -> dict[str, Cell]:
    """Cells of a cache, by measure, with the answers of earlier runs."""
    found = {}
    for measure in proof.of(cache):
        depends = proof.depends | {"cache": cache.settings(), "measure": measure.settings()}
        if reference is not None:
            # Divergences are from what BF16 said.
            depends["reference"] = reference[measure.name].path.stem
        found[measure.name] = proof.store.cell(cache.name, measure.name, depends)
    return found


class Prover:
    """Asks caches, each of a server of its own; several may be asked at the same time, from a thread each.

    Args:
        proof: what to ask.
        say: receives one line per step.

    Attributes:
        outcome: answers and remarks so far.
    """

    def __init__(self, proof: Proof, say: Callable[[str], None]) -> None:
        self.proof, self.say, self.outcome = proof, say, Outcome()
        self.running: list[LocalServer] = []
        self.bars = Bars()
        self.references = {measure.name: threading.Event() for measure in proof.measures}
        self.given_up = threading.Event()

    def open(self, cache: Cache) -> None:
        """Look for answers of earlier runs; the BF16 cache must come first."""
        found = open_cells(self.proof, cache, self.outcome.cells.get(BF16))
        self.outcome.cells[cache.name] = found
        self.outcome.servers[cache.name] = self.proof.store.cell(
            cache.name, SERVER, self.proof.depends | {"cache": cache.settings()}
        )

    def ask(self, cache: Cache) -> None:
        """Ask an opened cache what has no answer yet. Others than BF16 wait for its answers, measure by measure.

        Raises:
            ProveError: the BF16 cache could not be asked: there is nothing to compare with; or :meth:`give_up`.
        """
        cells = self.outcome.cells[cache.name]
        pending = {
            measure: [unit for unit in measure.units() if unit not in cells[measure.name].done]
            for measure in self.proof.of(cache)
            if cells[measure.name].left_out is None
        }
        done = sum(len(cell.done) for cell in cells.values())
        if any(pending.values()) or self.outcome.facts(cache) is None:
            self.say(f"{cache.title}: {done} answers kept, {sum(map(len, pending.values()))} to ask; starting a server")
            self._ask_server(cache, pending)
        else:
            self.say(f"{cache.title}: all {done} answers are there")
        for cell in cells.values():
            if cell.left_out:
                self.outcome.unavailable.setdefault(cell.left_out, []).append(cache.title)
        if cache.name == BF16:
            for event in self.references.values():
                event.set()

    def give_up(self) -> None:
        """End all servers, from another thread than those that ask."""
        self.given_up.set()
        for server in tuple(self.running):
            server.stop()

    def _ask_server(self, cache: Cache, pending: dict[Measure, list[str]]) -> None:
        proof, begin, log = self.proof, time.monotonic(), self.proof.folder / f"server_{cache.name}.log"
        model, env = cache.model or proof.settings.model, server_environment(proof.settings, cache.env)
        timeout = start_timeout() * (SLOWER if proof.servers > 1 else 1)
        try:
            with serve(model, log, cache.args, env, timeout, self.given_up) as server, self._known(server):
                self.say(f"{cache.title}: ready after {time.monotonic() - begin:.0f} s")
                if self._ask_facts(cache, server):
                    for measure, units in pending.items():
                        self._await_reference(cache, measure)
                        if units and not self._ask_measure(cache, server, measure, units):
                            break
                        if cache.name == BF16:
                            self.references[measure.name].set()
        except ServerFailedError as error:
            reason = f"{cache.title}: left out, {str(error).split(';')[0]}: {last_words(log)} (log: {log})"
            if cache.name == BF16 or self.given_up.is_set():
                raise ProveError(reason) from None
            self.outcome.remark(reason, failed=not cache.optional)
            self.say(reason)
        finally:
            self.outcome.seconds[cache.name] = round(time.monotonic() - begin, 1)

    @contextmanager
    def _known(self, server: LocalServer) -> Iterator[None]:
        """While inside, :meth:`give_up` ends the server."""
        self.running.append(server)
        try:
            self._check()
            yield
        finally:
            self.running.remove(server)

    def _check(self) -> None:
        if self.given_up.is_set():
            raise ProveError("the run was given up")

    def _await_reference(self, cache: Cache, measure: Measure) -> None:
        while cache.name != BF16 and not self.references[measure.name].wait(0.2):
            self._check()

    def _ask_facts(self, cache: Cache, server: LocalServer) -> bool:
        """Ask what the cache is; False if it is another one."""
        try:
            facts = ask(server.url)
            facts.check(cache.int2, cache.title)
        except HarnessError as error:
            self._check()
            if cache.name == BF16:
                raise ProveError(str(error)) from None
            self.outcome.remark(str(error), failed=True)
            self.say(str(error))
            return False
        self.outcome.servers[cache.name].add(SERVER, facts.to_json())
        return True

    def _ask_measure(self, cache: Cache, server: LocalServer, measure: Measure, units: list[str]) -> bool:
        """Ask all units; False if the server can answer no more."""
        cell, begin, client = self.outcome.cells[cache.name][measure.name], time.monotonic(), Client(server.url)
        try:
            if reason := measure.unavailable(client):
                cell.leave_out(f"{measure.title} left out, {reason}")
                return True
            self._ask_units(cache, client, measure, units)
        except AskingError as error:
            self._check()
            alive = server.healthy()
            why = str(error) if alive else f"the server ended: {last_words(server.log)} (log: {server.log})"
            reason = f"{cache.title}, {measure.title}: {len(cell.done)} of {len(measure.units())} answered, {why}"
            if cache.name == BF16:
                raise ProveError(f"{reason}; answers so far are kept") from None
            self.outcome.remark(reason, failed=True)
            self.say(reason)
            return alive
        self.say(f"{cache.title}: {measure.title}, {len(units)} asked in {time.monotonic() - begin:.0f} s")
        return True

    def _ask_units(self, cache: Cache, client: Client, measure: Measure, units: list[str]) -> None:
        cells = self.outcome.cells
        cell = cells[cache.name][measure.name]
        reference = None if cache.name == BF16 else cells[BF16][measure.name]
        bar = self.bars.bar(f"{cache.title}: {measure.title}", len(measure.units()), len(cell.done))
        with bar as advance, ThreadPoolExecutor(self.proof.in_flight(client.capacity(), measure.longest())) as pool:
            waiting = {pool.submit(measure.ask, client, unit, cell, reference): unit for unit in units}
            try:
                while waiting:
                    finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in finished:
                        cell.add(waiting.pop(future), future.result())
                        advance()
            except BaseException:
                # What is being answered is waited for by the pool, what was not begun is dropped.
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def last_words(log: Path) -> str:
    """The line of a server's log that says best why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("error")]
    return (errors or lines or ["no output"])[-1][:300]
