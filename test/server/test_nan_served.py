"""A token whose embedding is NaN: who only looked at it as a draft goes on, who says it is ended, and nobody else meets
it.
"""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from support.models import VOCABULARY, save
from support.releases import environment, needs_newer_python, served
from support.servers import HADAMARD, STRICT, Server, serve
from support.speculation import INT2, oracle, plugins, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the oracle drafts on the CPU engine"),
]
BROKEN = 5
"""The token."""
DRAFTED, REFUSED = ([random.Random(seed).randrange(6, VOCABULARY) for _ in range(150)] for seed in (1, 2))
ORACLE = oracle(4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save("qwen3", tmp_path_factory.mktemp("model"), tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def scores(server: Server, ids: list[int], tokens: int = 8) -> list[float]:
    answer = server.generate(ids, tokens, return_logprob=True)
    return [one[0] for one in answer["meta_info"]["output_token_logprobs"]]


def refused(server: Server, ids: list[int]) -> str:
    body = {"input_ids": ids, "rid": "the-broken-one", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    reply = requests.post(f"{server.url}/generate", json=body, timeout=600)
    assert reply.status_code == 500, reply.text
    return reply.text


def test_nan_ends_with_its_request(model: Path, tmp_path: Path) -> None:
    # Whatever comes first, the draft behind it is the broken token.
    texts = [[*DRAFTED, first] + [BROKEN] * 3 for first in range(VOCABULARY)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    env: dict[str, Any] = plugins("oracle_plugin") | HADAMARD | STRICT
    env |= {"ORACLE_TEXTS": str(tmp_path / "texts.json"), "ORACLE_PLAN": "right"}
    with serve(model, tmp_path / "log", *INT2, *ORACLE, "--page-size", "64", env=env) as server:
        # Drafted and rejected; later turns are behind the pages that were written then.
        answer = server.generate(DRAFTED, 40, return_logprob=True)
        found = [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
        assert all(not math.isnan(score) for score in found)
        turn = DRAFTED + answer["output_ids"] + REFUSED[:30]
        for tokens in (8, 8):
            assert all(not math.isnan(score) for score in scores(server, turn, tokens))

        # Said: a request of its own, among others that are not.
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(scores, server, REFUSED[:120] + [10 + i] * 30) for i in range(3)]
            said = pool.submit(refused, server, [*REFUSED[:100], BROKEN, *REFUSED[101:]])
            assert "not a number" in said.result()
            assert not any(math.isnan(score) for other in others for score in other.result())
        assert "int2 request the-broken-one: the request was ended" in server.text()
        assert "row of history" in server.text()
        # Its pages are nobody's: not even of the same request.
        begin = REFUSED[:99]
        requests.post(f"{server.url}/flush_cache", timeout=300).raise_for_status()
        refused(server, [*begin, BROKEN, *REFUSED[100:]])
        clean = server.generate(begin + REFUSED, 8, return_logprob=True)["meta_info"]
        assert clean["cached_tokens"] == 0
        assert all(not math.isnan(one[0]) for one in clean["output_token_logprobs"])
        assert server.alive()


@pytest.mark.parametrize("version", served())
def test_chunks_of_a_broken_prompt_are_nobodys(version: str, tmp_path: Path) -> None:
    """SGLang computes long prompts chunk by chunk, and shares a chunk before it reads what came out."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    fault = tmp_path / "fault"
    rng = random.Random(3)
    prompt = [rng.randrange(6, VOCABULARY) for _ in range(700)]  # more than the recent window, which no hit covers
    prompt[100] = BROKEN
    env = with_plugins(environment(version) | HADAMARD | STRICT, "embedding_fault_plugin")
    args = ["--page-size", "64", "--chunked-prefill-size", "64"]
    with serve(
        save("qwen3", tmp_path / "model"), tmp_path / "log", *INT2, *args, env=env | {"EMBEDDING_FAULT": str(fault)}
    ) as server:
        fault.touch()
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(scores, server, [10 + i, *REFUSED[:140]]) for i in range(2)]
            assert "not a number" in pool.submit(refused, server, prompt).result()
            assert not any(math.isnan(score) for other in others for score in other.result())
        assert server.text().count("int2 request the-broken-one") == 1
        fault.unlink()
        clean = server.generate(prompt, 8, return_logprob=True)["meta_info"]
        # The chunk in front of the token was right, and may stay.
        assert clean["cached_tokens"] <= 64
        assert all(not math.isnan(one[0]) for one in clean["output_token_logprobs"])
        assert server.alive()
