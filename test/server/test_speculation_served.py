"""Speculative decoding in int2 mode gives the answers of decoding one token after the other.

Drafts are right or wrong by plan (``support/oracle_plugin``): chains, wrong branches before right ones, accepted tokens
that lie scattered, padding. Rows are lossless, and NaN where a window must be read, so whatever a rejected token leaves
behind, or an accepted one does not take along, changes an answer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from support.api import retracted
from support.compare import assert_same
from support.models import save
from support.releases import environment, installed, needs_newer_python, served
from support.servers import HADAMARD, RETRACTED, STRICT, serve
from support.speculation import DRIFT, HALF, INT2, NEAR_TIE, SMALL, TOKENS, ask, behind, oracle, plugins, prompts

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
PLUGINS = plugins("lossless_plugin", "oracle_plugin")
NEW = 8
"""Tokens of a step."""
ORACLE = oracle(NEW)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What int2 mode answers without speculation."""
    with serve(model, tmp_path_factory.mktemp("plain") / "log", *INT2, env=PLUGINS | HADAMARD) as server:
        return ask(server, prompts(), workers=4)


@pytest.fixture(scope="module")
def texts(expected: list[dict], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the oracle finds them."""
    path = tmp_path_factory.mktemp("texts") / "texts.json"
    path.write_text(json.dumps([ids + one["output_ids"] for ids, one in zip(prompts(), expected, strict=True)]))
    return {"ORACLE_TEXTS": str(path)}


CONFIGURATIONS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "trees_chunked_retracted": (["--chunked-prefill-size", "128"], RETRACTED, 12),
    "trees_few_rows_evictions_small_windows": (
        ["--max-running-requests", "3", "--max-total-tokens", "4608", "--page-size", "16"],
        SMALL,
        12,
    ),
    "chains_no_windows": ([], {"SGLANG_ENABLE_MIXED_KV_WINDOWS": "0", "ORACLE_PLAN": "chains"}, 4),
    "all_wrong_small_windows": (["--page-size", "16"], SMALL | {"ORACLE_PLAN": "wrong"}, 6),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_answers_are_those_without(
    name: str, model: Path, expected: list[dict], texts: dict[str, str], tmp_path: Path
) -> None:
    """One pass cold, one with prefix hits, also on the generated text: what was rejected is in nobody's cache."""
    args, env, workers = CONFIGURATIONS[name]
    env = PLUGINS | HADAMARD | STRICT | texts | env
    with serve(model, tmp_path / "log", *INT2, *ORACLE, *args, env=env) as server:
        # Answers that end where the sink is full of tokens and one of them is not yet computed.
        ask(server, [ids for ids in prompts() if len(ids) == 15], 1, tokens=1)
        ask(server, [ids for ids in prompts() if len(ids) == 7], 1, tokens=9)
        for _ in range(2):
            answers = ask(server, prompts(), workers)
            assert_same(expected, answers, NEAR_TIE, DRIFT)
        tails = [ids + one["output_ids"][:HALF] for ids, one in zip(prompts(), expected, strict=True)]
        rest = [behind(one, HALF) for one in expected]
        assert_same(rest, ask(server, tails, workers, tokens=TOKENS - HALF), NEAR_TIE, DRIFT)
        steps = sum(one["meta_info"]["spec_verify_ct"] for one in answers)
        produced = sum(len(one["output_ids"]) for one in answers)
        if env.get("ORACLE_PLAN") == "wrong":
            assert produced <= steps * 1.1
        else:
            assert steps * 1.5 < produced < steps * (NEW - 1)
        if "SGLANG_TEST_RETRACT" in env:
            assert retracted(server) > 0
        assert server.alive()


def test_an_answer_may_end_inside_an_accepted_run(
    model: Path, expected: list[dict], texts: dict[str, str], tmp_path: Path
) -> None:
    """By length and by a token that stops it, at every place in a step; later requests take the rows."""
    env = PLUGINS | HADAMARD | STRICT | texts | SMALL | {"ORACLE_PLAN": "right"}
    with serve(model, tmp_path / "log", *INT2, *ORACLE, "--max-running-requests", "2", env=env) as server:
        ids, whole = prompts()[4], expected[4]["output_ids"]
        for tokens in range(1, 12):
            answer = server.generate(ids, tokens)
            assert answer["output_ids"] == whole[:tokens]
        for stop in range(10, 20):
            answer = server.generate(ids, TOKENS, sampling={"stop_token_ids": [whole[stop]], "ignore_eos": False})
            assert answer["output_ids"] == whole[: whole.index(whole[stop]) + 1]
        assert_same(expected, ask(server, prompts(), workers=2), NEAR_TIE, DRIFT)
        assert server.alive()


def test_ngram(model: Path, expected: list[dict], tmp_path: Path) -> None:
    """Drafts of SGLang's own: from the second time on it knows how a text goes on."""
    env = PLUGINS | HADAMARD | STRICT
    args = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-capacity", "100000"]
    with serve(model, tmp_path / "log", *INT2, *args, env=env) as server:
        for _ in range(3):
            answers = ask(server, prompts(), workers=4)
            assert_same(expected, answers, NEAR_TIE, DRIFT)
        steps = sum(one["meta_info"]["spec_verify_ct"] for one in answers)
        assert steps * 2 < len(answers) * TOKENS
        assert server.alive()


@pytest.mark.parametrize("version", [one for one in served() if one != installed()])
def test_other_releases(version: str, model: Path, expected: list[dict], texts: dict[str, str], tmp_path: Path) -> None:
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    env = PLUGINS | HADAMARD | STRICT | texts | SMALL | {"SGLANG_TEST_RETRACT": "1"}
    release = environment(version)
    env = release | env | {"PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], release["PYTHONPATH"]])}
    with serve(model, tmp_path / "log", *INT2, *ORACLE, "--chunked-prefill-size", "128", env=env) as server:
        for _ in range(2):
            assert_same(expected, ask(server, prompts(), workers=12), NEAR_TIE, DRIFT)
        assert retracted(server) > 0
        assert server.alive()
