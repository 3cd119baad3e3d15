"""Data-parallel attention: two ranks with requests, rows, rings and sinks of their own answer like stock SGLang.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import ranks
from support.compare import LOGPROBS, assert_same
from support.releases import environment, needs_newer_python, numbers, served
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, refills, serve
from support.speculation import with_plugins

pytestmark = ranks.MARKS
BOTH = [*TWO_RANKS, "--dp-size", "2", "--enable-dp-attention", "--max-running-requests", "4"]
"""Two requests and four sink blocks a rank."""
NEAR_TIE, DRIFT, TOKENS = 0.06, 0.08, 12
PROMPTS = ranks.prompts((900, 700, 40, 330, 650, 610, 620), seed=17)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.model_of_experts(tmp_path_factory.mktemp("moe"))


def ask(server: Server, *asked: tuple[int, int | None]) -> list[dict]:
    """All at once: prompts by number, each on a rank."""

    def one(number: int, rank: int | None) -> dict:
        where = {} if rank is None else {"routed_dp_rank": rank}
        return server.generate(PROMPTS[number], TOKENS, **LOGPROBS, **where)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda of: one(*of), asked))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict]]:
    """What stock SGLang answers on one rank."""
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *ranks.STOCK) as server:
        yield ask(server, *((number, None) for number in range(len(PROMPTS))))


def cached(answers: list[dict]) -> list[bool]:
    """Which of the requests hit."""
    return [answer["meta_info"]["cached_tokens"] > 0 for answer in answers]


@pytest.mark.parametrize("version", served())
def test_ranks_answer_like_stock(version: str, model: Path, expected: list[dict], tmp_path: Path) -> None:
    """One idle, one hitting, both busy with batches of other sizes, and hits whose sink block is gone."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    if numbers(version) < (0, 5, 19):
        pytest.skip(f"SGLang {version} exchanges rows of such ranks on GPUs alone")
    env = with_plugins(environment(version, **HADAMARD, **STRICT, **TWO_CORES), "lossless_plugin")
    env["LOSSLESS_ROWS_PRINT_DIGESTS"] = "1"
    with serve(model, tmp_path / "log", *ranks.INT2, *BOTH, "--chunked-prefill-size", "256", env=env) as server:

        def right(*asked: tuple[int, int]) -> list[bool]:
            answers = ask(server, *asked)
            assert_same([expected[number] for number, _ in asked], answers, NEAR_TIE, DRIFT)
            return cached(answers)

        assert right((0, 0)) == [False]  # the other is idle
        assert right((0, 1)) == [False]
        digests = re.findall(r"DP(\d).*rows of 911 tokens.*: (\S+)", server.text())
        assert [rank for rank, _ in digests] == ["0", "1"]
        assert len({digest for _, digest in digests}) == 1, "ranks store the same rows of the same prompt"
        assert right((0, 0), (1, 1)) == [True, False]  # one hits while the other computes a prompt
        assert right((2, 0), (3, 1), (0, 1)) == [False, False, True]  # padded to each other's sizes
        for number in (3, 4, 5, 6):  # as many beginnings as a rank has blocks
            right((number, 0))
        assert right((0, 0), (0, 1)) == [False, True]  # on one rank the sink block is gone, not on the other
        assert right((0, 0)) == [True]
        assert refills(server) == 0
        server.flush()
        assert right((0, 0)) == [False]
        assert server.alive()
