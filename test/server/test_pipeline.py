"""Two stages of a pipeline answer like stock SGLang on one rank, and agree on rows, seats and sinks without a word.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled. The model has three
layers, so stages have rows of other sizes.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from support import ranks
from support.api import wait_for
from support.compare import LOGPROBS, assert_same
from support.models import save
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, TWO_CORES, Server, refills, serve
from support.speculation import with_plugins

pytestmark = ranks.MARKS
STAGES = ["--pp-size", "2", "--max-running-requests", "2", "--chunked-prefill-size", "256"]
"""Four sink blocks."""
NEAR_TIE, DRIFT, TOKENS = 0.06, 0.08, 12
BROKEN = 5
"""The token whose embedding is no number for a while."""
LENGTHS = (900, 700, 40, 330, 650, 610)


def ask(server: Server, asked: list[list[int]], workers: int) -> list[dict]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), asked))


def tables(text: str, stage: str) -> list[str]:
    """What a stage says of requests that left: tokens, seat, sink block."""
    return re.findall(rf"PP{stage}\b.*rows of (.*): \S+", text)


@pytest.mark.parametrize("version", [installed()])
def test_stages_answer_like_stock(version: str, tmp_path: Path) -> None:
    """Cold and with hits, several batches on their way; hits whose sink block is gone; a prompt that breaks."""
    model, fault = save("qwen3_moe", tmp_path / "model"), tmp_path / "fault"
    asked = ranks.prompts(LENGTHS, 19, first=BROKEN + 1, least=BROKEN + 1)
    with serve(model, tmp_path / "stock.log", *ranks.STOCK) as stock:
        expected = ask(stock, asked, 3)
    own = environment(version, **HADAMARD, **STRICT, **TWO_CORES)
    env = with_plugins(own, "lossless_plugin", "embedding_fault_plugin")
    env |= {"LOSSLESS_ROWS_PRINT_DIGESTS": "1", "EMBEDDING_FAULT": str(fault)}
    with serve(model, tmp_path / "log", *ranks.INT2, *STAGES, env=env) as server:

        def hits(*numbers: int, workers: int = 1) -> list[bool]:
            answers = ask(server, [asked[number] for number in numbers], workers)
            assert_same([expected[number] for number in numbers], answers, NEAR_TIE, DRIFT)
            return [answer["meta_info"]["cached_tokens"] > 0 for answer in answers]

        assert hits(0, 1, 2, 3, workers=4) == [False] * 4
        assert hits(0, 1, workers=2) == [True] * 2
        fault.touch()
        broken = [*asked[4][:300], BROKEN, *asked[4][300:]]
        body = {"input_ids": broken, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        with ThreadPoolExecutor(2) as pool:
            said = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=600)
            assert hits(1) == [True]
        assert said.result().status_code == 500
        fault.unlink()
        assert server.generate(broken, 2)["meta_info"]["cached_tokens"] < 300
        hits(4, 5, 3)
        assert hits(0) == [False]  # its rows are there, but not its sink block
        assert hits(0) == [True]
        # The second stage says last what it knows of a request, when its client has the answer.
        wait_for(lambda: len(tables(server.text(), "1")) == len(tables(server.text(), "0")), "both stages")
        text = server.text()
        assert refills(server) == 0
        assert server.alive()
    ended = re.findall(r"PP(\d)\b.*int2 request .* is not kept", text)
    assert sorted(ended) == ["0", "1"]
    assert len(tables(text, "0")) > 10
    assert tables(text, "0") == tables(text, "1")
