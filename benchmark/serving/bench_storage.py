"""Megabytes per second of pages to files and back, beside a thread that never gives the interpreter up.

That is what a scheduler is to the threads that move pages: each has to ask for the interpreter again after every call
of the operating system, and gets it after 5 ms. Pages are written and read as a server does it, through
:class:`sglang_oscar.tiers.storage.CheckedStorage` and SGLang's file backend, by one thread and by as many as it has.
Files stay in the cache of the operating system, so the disk has no part in it. No GPU is needed.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from machine import describe

from sglang_oscar.tiers import storage
from sglang_oscar.tiers.pages import HostPages, PageLayout

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


def megabytes_per_s(call: Callable[[], bool], count: int) -> float:
    """Of a call that moves ``count`` pages.

    Raises:
        RuntimeError: it says that it could not.
    """
    begin = time.perf_counter()
    if not call():
        raise RuntimeError("pages could not be written or read")
    return round(count * LAYOUT.page_bytes / 1e6 / (time.perf_counter() - begin), 1)


def measure(threads: int, count: int) -> dict[str, float]:
    """Write and read so many pages by so many threads."""
    storage.THREADS = threads
    pool, keys = Pool(count), [f"{number:064x}" for number in range(count)]
    slots = torch.arange(count * LAYOUT.page_size)
    with tempfile.TemporaryDirectory() as folder:
        store = storage.CheckedStorage(file_backend(Path(folder)), pool, "salt")  # type: ignore[arg-type]
        pages = [pool.pages.page(number) for number in range(count)]
        return {
            "threads": threads,
            "written_MB_per_s": megabytes_per_s(lambda: store.batch_set(keys, pages), count),
            "read_MB_per_s": megabytes_per_s(lambda: all(store.batch_get_v1(keys, slots)), count),
        }


def main(
    pages: Annotated[int, typer.Option(help="pages of 1.3 MB")] = 512,
    out: Annotated[Path, typer.Option(help="result as JSON")] = Path("results/storage.json"),
) -> None:
    """Measure with an idle interpreter and beside a busy thread."""
    result: dict[str, Any] = describe() | {"pages": pages, "page_bytes": LAYOUT.page_bytes, "rows": []}
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    wanted = storage.THREADS
    for busy in (False, True):
        if busy:
            threading.Thread(target=spin, daemon=True).start()
        for threads in (1, wanted):
            result["rows"].append({"busy": busy} | measure(threads, pages))
            print(result["rows"][-1], flush=True)
    over.set()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
