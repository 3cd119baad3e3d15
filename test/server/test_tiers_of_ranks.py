"""Host memory and storage below two ranks: each keeps pages of its own heads, and both take the same hit.

Rows are lossless, and NaN where a window must be read, as long as nobody has waited for a layer that is being loaded,
and in sink blocks that are not filled. Log probabilities are compared with those of stock SGLang on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import ranks
from support.api import from_host, from_storage, wait_for
from support.compare import LOGPROBS, assert_same
from support.releases import environment, needs_newer_python, served
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, serve
from support.speculation import with_plugins

pytestmark = ranks.MARKS
INT2 = [*ranks.INT2, "--max-total-tokens", "2560", "--max-running-requests", "2"]
TIERS = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-storage-backend", "file"]
TIERS += ["--hicache-storage-prefetch-policy", "wait_complete"]
LENGTH, PAGE, STORED, BEGINNING = 900, 64, 640, 448
"""Of a prompt, of a page, what a hit on the prompt may have, and what of one prompt is stored first."""
WHOLE, SWAPPED, HALF, *_ = range(5)
"""Prompts by what becomes of their pages."""
END_EACH_OTHER = ("0.5.17", "0.5.18")
"""Releases in which a rank that lacks a page ends what the others read, wherever they are by then."""
TOKENS = 12
NEAR_TIE, DRIFT = 0.06, 0.08


def prompts() -> list[list[int]]:
    """More than the device has room for."""
    return ranks.prompts([LENGTH] * 5, seed=31)


def ask(server: Server, asked: list[list[int]]) -> list[dict]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in asked]


def pages(folder: Path, rank: int, ranks: int) -> set[Path]:
    """Files of a rank, by the ends of names that SGLang gives them."""
    return set(folder.glob(f"*_{rank}_{ranks}.bin"))


def of_rank(path: Path, rank: int, ranks: int) -> Path:
    """The same page under the name that SGLang gives it on another rank."""
    return path.with_name(re.sub(r"_\d+_\d+\.bin$", f"_{rank}_{ranks}.bin", path.name))


def write(folder: Path, server: Server, ids: list[int], ranks: int, stored: int = 0) -> tuple[dict, list[set[Path]]]:
    """The answer to a prompt, and the files that each rank has written once all its pages are in ``folder``.

    Args:
        folder: of the storage.
        server: with ``ranks`` ranks.
        ids: the prompt.
        ranks: how many there are.
        stored: tokens of the prompt whose pages are there already.
    """
    before = [pages(folder, rank, ranks) for rank in range(ranks)]

    def new() -> list[set[Path]]:
        return [pages(folder, rank, ranks) - old for rank, old in enumerate(before)]

    (answer,) = ask(server, [ids])
    count = len(ids) // PAGE - stored // PAGE
    wait_for(lambda: all(len(files) == count for files in new()), "pages of every rank in storage")
    return answer, new()


def swap(files: list[set[Path]]) -> None:
    """Give each of two ranks the pages of the other, under the names that SGLang looks for."""
    content = {of_rank(path, 1 - rank, 2): path.read_bytes() for rank, own in enumerate(files) for path in own}
    for path in set.union(*files):
        path.unlink()
    for path, page in content.items():
        path.write_bytes(page)


@contextmanager
def server_on(folder: Path, model: Path, log: Path, *args: str, version: str, **env: str) -> Iterator[Server]:
    """A server that stores its pages in ``folder``."""
    own = HADAMARD | STRICT | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)} | env
    own = with_plugins(environment(version, **own), "lossless_plugin", "late_host_plugin", "roomy_host_plugin")
    with serve(model, log, *INT2, *TIERS, *args, env=own) as server:
        yield server
        assert server.alive()


@pytest.fixture(scope="module")
def expected(stock_qwen3: Server) -> list[dict]:
    """What stock SGLang answers."""
    return ask(stock_qwen3, prompts())


@pytest.mark.parametrize("version", served())
def test_two_ranks_answer_like_stock(version: str, qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Cold, with hits in host memory and, after a restart, in storage. Pages of another number of ranks, of the other
    rank, and those that only one rank has whole, are never read."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    folder, asked = tmp_path / "store", prompts()
    with server_on(folder, qwen3, tmp_path / "one.log", version=version) as server:
        answer, (alone,) = write(folder, server, asked[WHOLE], 1)
        assert_same(expected[:1], [answer], NEAR_TIE, DRIFT)
    # Under the names by which two ranks would look for them, so that it is the key that tells them apart.
    foreign = {of_rank(path, rank, 2): path.read_bytes() for path in alone for rank in (0, 1)}
    for path, page in foreign.items():
        path.write_bytes(page)

    with server_on(folder, qwen3, tmp_path / "first.log", *TWO_RANKS, version=version, **TWO_CORES) as server:
        beginning, _ = write(folder, server, asked[HALF][:BEGINNING], 2)
        cold, files = zip(
            *(
                write(folder, server, ids, 2, stored=BEGINNING if number == HALF else 0)
                for number, ids in enumerate(asked)
            ),
            strict=True,
        )
        fresh = [beginning, *(answer for number, answer in enumerate(cold) if number != HALF)]
        assert [answer["meta_info"]["cached_tokens"] for answer in fresh] == [0] * len(fresh)
        assert_same(expected, list(cold), NEAR_TIE, DRIFT)
        again = ask(server, asked)
        assert_same(expected, again, NEAR_TIE, DRIFT)
        hits = from_host(again)
        assert sum(hit >= STORED for hit in hits) >= len(asked) - 2, f"tokens from the host {hits}"
        assert from_storage(again) == [0] * len(asked)
        text = server.text()
    assert set(re.findall(r"(TP\d)\] int2 memory: host tier: ", text)) == {"TP0", "TP1"}
    assert "is damaged" not in text
    assert {path: path.read_bytes() for path in foreign} == foreign

    swap(files[SWAPPED])
    for path in files[HALF][1]:
        page = path.read_bytes()
        path.write_bytes(page[:500] + bytes([page[500] ^ 1]) + page[501:])
    with server_on(folder, qwen3, tmp_path / "second.log", *TWO_RANKS, version=version, **TWO_CORES) as server:
        restarted = ask(server, asked)
        assert_same(expected, restarted, NEAR_TIE, DRIFT)
        found, read = [STORED] * len(asked), from_storage(restarted)
        found[SWAPPED], found[HALF] = 0, BEGINNING
        if version in END_EACH_OTHER:
            assert 0 <= read[HALF] <= BEGINNING
            found[HALF] = read[HALF]
        assert read == found
        text = server.text()
    assert set(re.findall(r"(TP\d)\] int2 storage: page \w+ is damaged", text)) == {"TP1"}
    assert set(re.findall(r"(TP\d)\] int2 sink refill: ", text)) == {"TP0", "TP1"}
