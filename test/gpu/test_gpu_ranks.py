"""Several GPUs give one rank's answers, and all ranks agree on sinks and evictions without a word to each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support import golden
from support.compare import assert_same
from support.fleet import PLUGIN
from support.reference import MODEL
from support.servers import STRICT, serve

NEAR_TIE = 2.0
DRIFT = 1.3
"""As in test_servers.py."""
FEW = ("--max-total-tokens", "24576", "--max-running-requests", "8", "--mem-fraction-static", "0.85")
"""Far less than 64 documents take: prefixes and sink blocks are evicted all the time."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_with_each_other_and_with_one(ranks: int, tmp_path: Path) -> None:
    """The model has two kv heads: on four GPUs, two ranks each hold a copy of one."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    expected = golden.load()
    env = golden.ROTATIONS | STRICT | PLUGIN | {"GPU_CHECKS": "ranks"}
    args = (*golden.ARGS, *golden.WHOLE, *FEW, "--tp-size", str(ranks), "--enable-cache-report")
    with serve(MODEL, tmp_path / "log", *args, env=env) as server:
        conversations = golden.conversations(server, expected["conversations"])
        for workers in (1, 64):
            assert_same(golden.stable(expected["many"]), golden.stable(golden.many(server, workers)), NEAR_TIE, DRIFT)
        again = golden.many(server, workers=8, flush=False)
        assert_same(golden.stable(expected["many"]), golden.stable(again), NEAR_TIE, DRIFT)
        assert server.alive()
        text = server.text()
    assert_same(expected["conversations"], conversations, NEAR_TIE, DRIFT)
    assert any(answer["meta_info"]["cached_tokens"] for answer in conversations)
    # Ranks write to one log: a line may follow another without a break.
    said = {rank: re.findall(rf"gpu_checks: rank {rank} ([0-9a-f]{{16}})", text) for rank in range(ranks)}
    assert len(said[0]) > 80  # passes over prompts: one each in conversations and one by one, fewer at once
    assert len(set(said[0])) > 50  # most of them change something
    for rank in range(1, ranks):
        # Ranks run a step apart: the last digests of one may be missing.
        common = min(len(said[0]), len(said[rank]))
        assert common > 80
        assert said[rank][:common] == said[0][:common]
    assert "Traceback" not in text
