"""A trainer takes the cache's memory and gives it back: the GPU has it meanwhile, and answers are as before.

Rows are exact, decode steps are CUDA graphs, and the memory comes back as NaN.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import requests
import torch

from support import golden
from support.compare import assert_same
from support.fleet import checked
from support.gpu_answers import DRIFT, NEAR_TIE, healthy, right
from support.reference import MODEL
from support.servers import EXACT, STRICT, Server, serve

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_memory_saver") is None, reason="torch_memory_saver is not installed"
)
ARGS = [*golden.ARGS, *golden.WHOLE, "--enable-memory-saver", "--mem-fraction-static", "0.85", "--enable-cache-report"]
ARGS += ["--max-total-tokens", "262144", "--max-running-requests", "128", "--decode-log-interval", "1"]
TAKEN = re.compile(r"int2 memory: (?:history pool: .*? = |window buffers: )([\d.]+) GiB")
RESUMED = "gpu_checks: resumed"


def occupation(server: Server, what: str) -> int:
    """Release or resume the cache; free bytes of the GPU behind it."""
    reply = requests.post(f"{server.url}/{what}_memory_occupation", json={"tags": ["kv_cache"]}, timeout=600)
    reply.raise_for_status()
    return torch.cuda.mem_get_info()[0]


def test_release_and_resume(tmp_path: Path) -> None:
    with serve(MODEL, tmp_path / "log", *ARGS, env=EXACT | STRICT | checked("resume")) as server:
        before = golden.many(server, workers=7)
        resumed = server.text().count(RESUMED)  # newer releases flush once behind their own warm-up
        took = sum(map(float, TAKEN.findall(server.text())))
        for _ in range(2):
            held = torch.cuda.mem_get_info()[0]
            free = occupation(server, "release")
            print(f"{took:.3f} GiB of rows and windows, {(free - held) / (1 << 30):.3f} GiB released")
            assert free - held > 0.95 * took * (1 << 30)
            occupation(server, "resume")
            after = golden.many(server, workers=7)
            assert_same(golden.stable(before), golden.stable(after), NEAR_TIE, DRIFT)
            assert right(after) >= 56
        assert server.text().count(RESUMED) == resumed + 2
        assert re.search(r"Decode batch.*cuda graph: True", server.text())
        healthy(server)
