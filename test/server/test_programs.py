"""Programs of SGLang that make engines or models themselves and load no plugins run in int2 mode by ``oscar run``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_cpu.server import has_gpu
from support.reference import MODEL, document
from support.servers import EXACT, HADAMARD, server_environment

pytestmark = pytest.mark.server
INT2 = ("--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64")
ONE_BATCH = "sglang.benchmark.one_batch"
SIZES = ("--mem-fraction-static", "0.5", "--max-total-tokens", "16384", "--max-running-requests", "8")


def started(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *command, "--model-path", str(MODEL), "--random-seed", "0", *SIZES]
    command += [] if has_gpu() else ["--device", "cpu"]
    return subprocess.run(
        command, env=server_environment(env), capture_output=True, text=True, timeout=900, check=False
    )


def output(command: list[str], env: dict[str, str]) -> str:
    done = started(command, env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_one_batch_without_a_scheduler(tmp_path: Path) -> None:
    """Rows of 16 bits give the answers of stock SGLang."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(document(500, seed).text.replace("\n", " ") + "\n" for seed in (2, 3)))
    asked = ["--correctness-test", "--output-len", "12", "--cut-len", "64", "--prompt-filename", str(prompts)]
    stock = output([ONE_BATCH, *asked], {})
    ours = output(["oscar_tools", "run", ONE_BATCH, *asked, *INT2], EXACT)
    answers = [text.partition("== Prompt 0 ==")[2] for text in (stock, ours)]
    assert len(answers[0]) > 1000
    assert answers[1] == answers[0]
    refused = started(["oscar_tools", "run", ONE_BATCH, *asked, *INT2, "--enable-streaming-session"], HADAMARD)
    assert (refused.returncode, "does not support streaming sessions" in refused.stderr.splitlines()[-1]) == (78, True)


def test_offline_throughput(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    talk = [{"from": "human", "value": document(500, 1).text}, {"from": "gpt", "value": "yes"}]
    texts.write_text(json.dumps([{"conversations": talk}] * 4))
    asked = ["--dataset-name", "random", "--dataset-path", str(texts), "--num-prompts", "2", "--skip-warmup"]
    asked += ["--random-input-len", "400", "--random-output-len", "8"]
    said = output(["oscar_tools", "run", "sglang.benchmark.offline_throughput", *asked, *INT2], HADAMARD)
    assert re.search(r"Successful requests: +2\b", said)
