"""Loads sent with SGLang's own load generator, ``sglang.bench_serving``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paper_loads import Load

from sglang_oscar.cpu.server import environment
from sglang_oscar.local_server import LocalServer

LIMIT = 7200
"""Seconds that a load may take."""


def generate(
    server: LocalServer, model: Path, load: Load, answer: int, flush: bool, warm_up: bool = True
) -> dict[str, Any]:
    """Send a load with ``sglang.bench_serving``; what it reports.

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
        report = Path(folder) / "report.jsonl"
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
        command += ["--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids"]
        command += ["--tokenize-prompt", "--random-input-len", str(load.prompt), "--random-output-len", str(answer)]
        command += ["--random-range-ratio", "1", "--num-prompts", str(load.requests), "--disable-tqdm"]
        command += ["--max-concurrency", str(load.requests), "--seed", str(load.prompt + load.requests)]
        command += ["--output-file", str(report), "--warmup-requests", str(int(warm_up))]
        command += ["--flush-cache"] if flush else []
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, errors="replace", timeout=LIMIT, check=False
        )
        if done.returncode or not report.is_file():
            raise RuntimeError(f"sglang.bench_serving failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
    if found["completed"] != load.requests:
        raise RuntimeError(f"{load.requests - found['completed']} of {load.requests} requests failed; see {server.log}")
    return found
