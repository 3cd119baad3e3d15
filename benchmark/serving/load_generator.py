"""Loads sent with SGLang's own load generator, ``sglang.benchmark.serving``.

It takes seconds to import, as long as many loads take. So one process imports it, and every load is a fork of that.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from paper_loads import Load

from oscar_cpu.server import environment
from oscar_tools.local_server import LocalServer

LIMIT = 7200
"""Seconds that a load may take."""
GENERATOR = "sglang.benchmark.serving"
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([GENERATOR])


def _run(arguments: list[str], env: dict[str, str], log: str) -> None:
    """Be ``python -m sglang.benchmark.serving``, with all that it prints in a file."""
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [GENERATOR, *arguments]
    importlib.import_module(GENERATOR).cli_main()


def prepare() -> None:
    """Begin to import the load generator, while a server starts."""
    forkserver.ensure_running()


def generate(
    server: LocalServer, model: Path, load: Load, answer: int, flush: bool, warm_up: bool = True
) -> dict[str, Any]:
    """Send a load with ``sglang.benchmark.serving``; what it reports.

    Args:
        server: to ask.
        model: folder with the tokenizer.
        load: requests and prompts; the same load has the same prompts.
        answer: tokens of an answer.
        flush: whether the prefix cache is emptied before.
        warm_up: whether a request is sent that does not count.

    Raises:
        RuntimeError: it failed, or requests did.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder) / "report.jsonl", Path(folder) / "log"
        arguments = ["--backend", "sglang", "--base-url", server.url, "--model", str(model), "--tokenizer", str(model)]
        arguments += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-input-len", str(load.prompt)]
        arguments += ["--random-output-len", str(answer), "--random-range-ratio", "1", "--disable-tqdm"]
        arguments += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.requests)]
        arguments += ["--seed", str(load.prompt + load.requests), "--warmup-requests", str(int(warm_up))]
        arguments += ["--output-file", str(report), *(["--flush-cache"] if flush else [])]
        process = _forks.Process(target=_run, args=(arguments, environment(), str(log)), daemon=True)
        process.start()
        process.join(LIMIT)
        if process.exitcode != 0 or not report.is_file():
            process.kill()
            said = log.read_text(errors="replace")[-3000:] if log.is_file() else ""
            raise RuntimeError(f"{GENERATOR} failed, with status {process.exitcode}:\n{said}")
        found: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
    if found["completed"] != load.requests:
        raise RuntimeError(f"{load.requests - found['completed']} of {load.requests} requests failed; see {server.log}")
    return found
