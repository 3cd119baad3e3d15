"""Megabytes per second of pages to files and back, alone and beside a scheduler, and what that costs the scheduler.

A scheduler never rests: it holds the interpreter but for moments, in every operation of PyTorch. A thread that moves
pages beside it has the interpreter back 5 ms after every call of the operating system, and each time it takes it the
scheduler waits. A thread of small operations stands for the scheduler here. Pages are moved as a server does it, by a
process of :class:`sglang_oscar.features.tiers.storage.CheckedStorage`, and for comparison one by one by threads,
through SGLang's file backend. Files stay in the cache of the operating system, so the disk has no part in it. No GPU is
needed.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from machine import describe

from sglang_oscar.features.tiers.pages import HostPages, PageLayout
from sglang_oscar.features.tiers.storage import CheckedStorage

LAYOUT = PageLayout(64, ((288,) * 36, (288,) * 36))
"""Pages of Qwen3-8B with 2 bits a side, group 128: 1.3 MB."""


class Pool:
    """As much of a host tier as storage asks for: its pages, one behind the other."""

    page_layout = LAYOUT
    page_size = LAYOUT.page_size

    def __init__(self, count: int) -> None:
        rows = torch.randint(0, 256, (count * LAYOUT.page_bytes,), dtype=torch.uint8)
        self.pages = HostPages(LAYOUT, rows, page_first=True)

    def get_data_page(self, slot: int) -> torch.Tensor:
        return self.pages.page(slot // LAYOUT.page_size)


def file_backend(folder: Path) -> Any:
    """SGLang's, of one rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    config = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config |= {"model_name": "m", "is_mla_model": False, "extra_config": None, "dcp_size": 1}
    return HiCacheFile(SimpleNamespace(**config), str(folder))


class Scheduler:
    """A thread of small operations, and how many of them it gets done."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._done = 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        numbers = torch.zeros(64)
        while not self._over.is_set():
            numbers.add_(1)
            self._done += 1

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def per_s(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds that a call takes, and operations per second meanwhile."""
        before = self._done
        seconds = timed(call)
        return seconds, (self._done - before) / seconds


def movers(store: CheckedStorage, pool: Pool, threads: int) -> dict[str, Callable[..., Any]]:
    """What writes pages of keys and slots, looks whether they are there, and reads them: the process, or threads."""
    if not threads:
        return {
            "written": store.batch_set_v1,
            "looked_for": lambda keys, _: [True] * store.batch_exists(keys),
            "read": store.batch_get_v1,
        }
    several = ThreadPoolExecutor(threads)

    def write(keys: list[str], slots: torch.Tensor) -> Iterator[bool]:
        return several.map(store.set, keys, map(pool.get_data_page, slots[:: pool.page_size].tolist()))

    def read(keys: list[str], slots: torch.Tensor) -> Iterator[bool]:
        places = map(pool.get_data_page, slots[:: pool.page_size].tolist())
        return (page is not None for page in several.map(store.get, keys, places))

    return {"written": write, "looked_for": lambda keys, _: map(store.exists, keys), "read": read}


def measure(count: int, threads: int, beside: bool) -> dict[str, Any]:
    """Write and read so many pages by a process or by threads, beside a scheduler or alone.

    Raises:
        RuntimeError: pages could not be written or read.
    """
    pool, keys = Pool(count), [f"{number:064x}" for number in range(count)]
    slots, megabytes = torch.arange(count * LAYOUT.page_size), count * LAYOUT.page_bytes / 1e6
    row: dict[str, Any] = {"by": f"{threads} threads" if threads else "process", "beside_scheduler": beside}
    with tempfile.TemporaryDirectory() as folder, Scheduler() if beside else contextlib.nullcontext() as scheduler:
        store = CheckedStorage(file_backend(Path(folder)), pool, "salt")  # type: ignore[arg-type]
        moves = movers(store, pool, threads)
        for move in moves.values():  # what is started once is not counted
            list(move(["f" * 64], slots[: LAYOUT.page_size]))
        undisturbed = scheduler.per_s(lambda: time.sleep(1))[1] if scheduler else 0.0
        for name, move in moves.items():
            moved: list[bool] = []
            call = partial(lambda move, moved: moved.extend(move(keys, slots)), move, moved)
            seconds, speed = scheduler.per_s(call) if scheduler else (timed(call), 0.0)
            if len(moved) < count or not all(moved):
                raise RuntimeError(f"not all pages were {name}")
            row[f"{name}_ms"] = round(1e3 * seconds, 1)
            if name != "looked_for":
                row[f"{name}_MB_per_s"] = round(megabytes / seconds, 1)
            if scheduler and seconds > 0.1:  # or it is chance
                row[f"scheduler_slowed_while_{name}"] = round(undisturbed / max(speed, 1), 2)
        store.close()
    return row


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main(
    pages: Annotated[int, typer.Option(help="pages of 1.3 MB")] = 512,
    threads: Annotated[str, typer.Option(help="numbers of threads to compare with, separated by commas")] = "1,16",
    out: Annotated[Path, typer.Option(help="result as JSON")] = Path("results/storage.json"),
) -> None:
    """Measure alone and beside a scheduler."""
    result: dict[str, Any] = describe() | {"pages": pages, "page_bytes": LAYOUT.page_bytes, "rows": []}
    for by in [0, *map(int, filter(None, threads.split(",")))]:
        for beside in (False, True):
            result["rows"].append(measure(pages, by, beside))
            print(result["rows"][-1], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
