"""The run: one server per cache, every measure's units asked of it, answers kept as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from oscar_rotation.model_table import ModelSettings
from sglang_oscar.calibration.dump_driver import server_environment
from sglang_oscar.evaluation.prove.asking import AskingError, Client
from sglang_oscar.evaluation.prove.caches import BF16, Cache
from sglang_oscar.evaluation.prove.measures import Measure
from sglang_oscar.evaluation.prove.store import Cell, Store
from sglang_oscar.local_server import LocalServer, ServerFailedError, serve

Cells = dict[str, dict[str, Cell]]
"""Cache -> measure -> answers."""


class ProveError(RuntimeError):
    """The run cannot go on; the message is one line. What was answered is kept."""


@dataclass(frozen=True)
class Plan:
    """What to ask.

    Attributes:
        settings: of the model.
        measures: in order.
        store: where answers are kept.
        folder: for server logs.
        depends: what every answer depends on besides cache and measure: model, text, versions, machine.
        at_once: requests in flight.
    """

    settings: ModelSettings
    measures: Sequence[Measure]
    store: Store
    folder: Path
    depends: dict[str, Any]
    at_once: int

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
        remarks: what was left out and why, one line each.
        unavailable: why a measure cannot be asked -> titles of the caches.
        failed: whether something that should work did not.
        seconds: cache -> time that its server ran for this run.
    """

    cells: Cells = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    unavailable: dict[str, list[str]] = field(default_factory=dict)
    failed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def remark(self, text: str, failed: bool = False) -> None:
        """Note what was left out."""
        if text not in self.remarks:
            self.remarks.append(text)
        self.failed |= failed


def open_cells(plan: Plan, cache: Cache, reference: dict[str, Cell] | None) -> dict[str, Cell]:
    """Cells of a cache, by measure, with the answers of earlier runs."""
    found = {}
    for measure in plan.measures:
        depends = plan.depends | {"cache": cache.settings(), "measure": measure.settings()}
        if reference is not None:
            # Divergences are from what BF16 said.
            depends["reference"] = reference[measure.name].path.stem
        found[measure.name] = plan.store.cell(cache.name, measure.name, depends)
    return found


def prove(plan: Plan, cache: Cache, outcome: Outcome, say: Callable[[str], None]) -> None:
    """Ask a cache what has no answer yet; the BF16 cache must come first.

    Args:
        plan: what to ask.
        cache: of whom.
        outcome: receives answers and remarks.
        say: receives one line per step.

    Raises:
        ProveError: the BF16 cache could not be asked: there is nothing to compare with.
    """
    cells = open_cells(plan, cache, outcome.cells.get(BF16))
    outcome.cells[cache.name] = cells
    pending = {
        measure: [unit for unit in measure.units() if unit not in cells[measure.name].done]
        for measure in plan.measures
        if cells[measure.name].left_out is None
    }
    done = sum(len(cell.done) for cell in cells.values())
    if any(pending.values()):
        say(f"{cache.title}: {done} answers kept, {sum(map(len, pending.values()))} to ask; starting a server")
        _ask_server(plan, cache, pending, outcome, say)
    else:
        say(f"{cache.title}: all {done} answers are there")
    for cell in cells.values():
        if cell.left_out:
            outcome.unavailable.setdefault(cell.left_out, []).append(cache.title)


def _ask_server(
    plan: Plan, cache: Cache, pending: dict[Measure, list[str]], outcome: Outcome, say: Callable[[str], None]
) -> None:
    begin, log = time.monotonic(), plan.folder / f"server_{cache.name}.log"
    try:
        with serve(plan.settings.model, log, cache.args, server_environment(plan.settings, cache.env)) as server:
            say(f"{cache.title}: ready after {time.monotonic() - begin:.0f} s")
            for measure, units in pending.items():
                if units and not _ask_measure(plan, cache, server, measure, units, outcome, say):
                    break
    except ServerFailedError as error:
        reason = f"{cache.title}: left out, {str(error).split(';')[0]}: {last_words(log)} (log: {log})"
        if cache.name == BF16:
            raise ProveError(reason) from None
        outcome.remark(reason, failed=not cache.optional)
        say(reason)
    finally:
        outcome.seconds[cache.name] = round(time.monotonic() - begin, 1)


def _ask_measure(
    plan: Plan,
    cache: Cache,
    server: LocalServer,
    measure: Measure,
    units: list[str],
    outcome: Outcome,
    say: Callable[[str], None],
) -> bool:
    """Ask all units; False if the server can answer no more."""
    cell, begin, client = outcome.cells[cache.name][measure.name], time.monotonic(), Client(server.url)
    try:
        if reason := measure.unavailable(client):
            cell.leave_out(f"{measure.title} left out, {reason}")
            return True
        _ask_units(plan, cache, client, measure, units, outcome.cells)
    except AskingError as error:
        alive = server.healthy()
        why = str(error) if alive else f"the server ended: {last_words(server.log)} (log: {server.log})"
        reason = f"{cache.title}, {measure.title}: {len(cell.done)} of {len(measure.units())} answered, {why}"
        if cache.name == BF16:
            raise ProveError(f"{reason}; answers so far are kept") from None
        outcome.remark(reason, failed=True)
        say(reason)
        return alive
    say(f"{cache.title}: {measure.title}, {len(units)} asked in {time.monotonic() - begin:.0f} s")
    return True


def _ask_units(plan: Plan, cache: Cache, client: Client, measure: Measure, units: list[str], cells: Cells) -> None:
    cell = cells[cache.name][measure.name]
    reference = None if cache.name == BF16 else cells[BF16][measure.name]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = console.is_terminal
    with (
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown) as bars,
        ThreadPoolExecutor(plan.in_flight(client.capacity(), measure.longest())) as pool,
    ):
        task = bars.add_task(f"{cache.title}: {measure.title}", total=len(measure.units()), completed=len(cell.done))
        waiting = {pool.submit(measure.ask, client, unit, cell, reference): unit for unit in units}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    cell.add(waiting.pop(future), future.result())
                    bars.advance(task)
        except BaseException:
            # What is being answered is waited for by the pool, what was not begun is dropped.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def last_words(log: Path) -> str:
    """The line of a server's log that says best why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("error")]
    return (errors or lines or ["no output"])[-1][:300]
