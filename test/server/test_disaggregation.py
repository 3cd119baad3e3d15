"""Prefill on one server, decode on another, through Mooncake over TCP and nixl: answers are those of one server.

Rows are lossless and rows under windows are NaN; so are rings and sink blocks until somebody fills them. Log
probabilities are compared, because tokens alone do not show a wrong sink.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import load_rotation
from support.compare import LOGPROBS, assert_same
from support.disaggregated import ENVIRONMENT, Pair, backend_params, over, serve_pair
from support.models import VOCABULARY, save
from support.releases import installed
from support.servers import HADAMARD, IDENTITY, STRICT, TWO_CORES, TWO_RANKS, Server, refills, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--skip-tokenizer-init"]
INT2 += ["--enable-fp32-lm-head", "--max-running-requests", "4"]
BF16 = ["--attention-backend", "torch_native", "--skip-tokenizer-init", "--page-size", "64"]
if installed() != "0.5.17":  # which knows no other way
    BF16 += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
ENV = LOSSLESS | HADAMARD | STRICT
NEAR_TIE = DRIFT = 0.06
TOKENS = 12
LENGTHS = [1, 20, 63, 64, 70, 255, 300, 640, 900, 1300]
"""Prompts below, at and above the ends of sink and recent window."""


def prompts(lengths: list[int], seed: int = 3) -> list[list[int]]:
    """Prompts that have no first token in common."""
    rng = random.Random(seed)
    return [
        [number, *(rng.randrange(VOCABULARY) for _ in range(length - 1))] for number, length in enumerate(lengths, 1)
    ]


def ask(server: Server | Pair, of: list[list[int]], workers: int = 1, tokens: int = TOKENS) -> list[dict]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), of))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """What one server answers, by tokens of an answer."""
    with serve(model, tmp_path_factory.mktemp("one") / "log", *INT2, env=ENV) as server:
        return {tokens: ask(server, prompts(LENGTHS), workers=4, tokens=tokens) for tokens in (TOKENS, 330)}


@pytest.fixture(scope="module", params=backend_params())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(model: Path, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, chunks = tmp_path_factory.mktemp("pair"), ("--chunked-prefill-size", "256")
    with serve_pair(model, folder, *INT2, backend=backend, env=ENV, prefill=chunks) as two:
        yield two


def test_answers_are_those_of_one_server(pair: Pair, expected: dict[int, list[dict]]) -> None:
    """One after the other, then four at a time with chunked prompts and hits on the prefill server."""
    assert_same(expected[TOKENS], ask(pair, prompts(LENGTHS)), NEAR_TIE, DRIFT)
    again = ask(pair, prompts(LENGTHS), workers=4)
    assert_same(expected[TOKENS], again, NEAR_TIE, DRIFT)
    assert again[-1]["meta_info"]["cached_tokens"] >= 1024 - 256
    assert refills(pair.decode) > 0


def test_long_answers(pair: Pair, expected: dict[int, list[dict]]) -> None:
    """Answers longer than the recent window: what arrived has left the ring, sinks of short prompts are complete."""
    assert_same(expected[330], ask(pair, prompts(LENGTHS), workers=6, tokens=330), NEAR_TIE, DRIFT)
    assert pair.prefill.alive()
    assert pair.decode.alive()


def test_bits_that_differ_by_layer(model: Path, backend: str, tmp_path: Path) -> None:
    """Rows of other sizes in every layer, which lossless ones are not: those of two bits and more, as they are sent."""
    env = STRICT | by_layer(tmp_path)
    of = prompts([300, 640, 1100])
    with serve(model, tmp_path / "one.log", *INT2, env=env) as server:
        alone = ask(server, of)
    with serve_pair(model, tmp_path, *INT2, backend=backend, env=env) as pair:
        assert_same(alone, ask(pair, of), NEAR_TIE, DRIFT)


def by_layer(folder: Path) -> dict[str, str]:
    """Variables of Hadamard rotations of three layers, each with other bits, one by kv head."""
    env = {}
    for side, bits in (("K", (2, (3, 2), 4)), ("V", (2, 2, 4))):
        plain = load_rotation("hadamard", num_layers=3, head_dim=64, side=side.lower(), model=None, layers=(0, 1, 2))
        path = folder / f"{side}.safetensors"
        save_rotation_file(path, replace(plain, bits=bits))
        env[f"SGLANG_OSCAR_{side}_ROTATION_PATH"] = str(path)
    return env


def test_retracted_requests_go_on(model: Path, backend: str, expected: dict[int, list[dict]], tmp_path: Path) -> None:
    """A decode server that is out of memory keeps rows and recent windows on the host, and puts them back."""
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with serve_pair(model, tmp_path, *INT2, backend=backend, env=ENV, of_decode=retracting) as pair:
        assert_same(expected[TOKENS], ask(pair, prompts(LENGTHS), workers=6), NEAR_TIE, DRIFT)
        assert "#retracted_reqs" in pair.decode.text()


def test_prompts_that_are_computed_before_a_decode_server_asks(
    model: Path, backend: str, expected: dict[int, list[dict]], tmp_path: Path
) -> None:
    """And some computed once more, because nobody asked in time: --optimistic-prefill-attempts."""
    early = ("--chunked-prefill-size", "256", "--optimistic-prefill-attempts", "2")
    retried = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}
    with serve_pair(model, tmp_path, *INT2, backend=backend, env=ENV | retried, prefill=early) as pair:
        pair.ahead = 3.0
        assert_same(expected[TOKENS], ask(pair, prompts(LENGTHS), workers=4), NEAR_TIE, DRIFT)
        assert "optimistic prefill yielded" in pair.prefill.text()
        assert pair.prefill.alive()
        assert pair.decode.alive()


def test_embeddings_in_place_of_tokens_are_refused(model: Path, backend: str, tmp_path: Path) -> None:
    """By the decode server, which cannot compute their sink; it goes on."""
    uncached = (*INT2, "--disable-radix-cache")
    with serve_pair(model, tmp_path, *uncached, backend=backend, env=ENV) as pair:
        before = ask(pair, prompts([300]))
        hidden = json.loads((model / "config.json").read_text())["hidden_size"]
        body = {"input_embeds": [[0.01] * hidden] * 100, "sampling_params": {"max_new_tokens": 4}} | pair._meeting()
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(requests.post, f"{of.url}/generate", json=body) for of in (pair.prefill, pair.decode)]
            answer = sent[1].result(timeout=300)
        assert answer.status_code == 400
        assert "send input_ids" in answer.text
        assert_same(before, ask(pair, prompts([300])), NEAR_TIE, DRIFT)


@pytest.mark.parametrize("other", ["rotation", "format", "ranks"])
def test_servers_that_store_otherwise_are_refused(
    pair: Pair, model: Path, backend: str, tmp_path: Path, other: str
) -> None:
    """By name, before anything is sent; the prefill server goes on."""
    if (other, backend) == ("format", "nixl"):
        pytest.skip("stock SGLang has nixl look for a BF16 cache on a GPU")
    args, env = {
        "rotation": (INT2, LOSSLESS | IDENTITY),
        "format": (BF16, {}),
        "ranks": ([*INT2, *TWO_RANKS], ENV | TWO_CORES),
    }[other]
    alone = ("--disaggregation-mode", "decode", *over(backend))
    with serve(model, tmp_path / "log", *args, *alone, env=env | ENVIRONMENT) as decode, ThreadPoolExecutor(1) as pool:
        request = pool.submit(Pair(pair.prefill, decode, pair.port).ask_decode, prompts([100])[0], 4)
        assert request.exception(timeout=900) is not None
    line = next(line for line in decode.text().splitlines() if "KV cache dtype mismatch" in line)
    assert "int2 with --tp-size 1 on both servers (format " in line
    assert ("with --tp-size 2 on both servers" in line) == (other == "ranks")
    assert "sink 64, recent window 256" in line
    assert pair.prefill.alive()
