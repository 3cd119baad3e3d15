"""Speculative decoding of hybrid models: answers are those of stock SGLang without drafts, in every turn.

Drafts are right or wrong by plan (``support/oracle_plugin``), so pages end behind every token of a step, accepted or
not, and states are kept there; the next turn goes on from such a state. Rows are lossless, and NaN where a window must
be read; rings and sink blocks are NaN until they are filled. So a window that does not belong to its state shows.
"""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from support import draft_models
from support.compare import LOGPROBS, assert_same
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import DRIFT, INT2, NEAR_TIE, oracle, per_step, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "4"]
STOCK += ["--skip-tokenizer-init", "--dtype", "float32"]
PAGE, TURNS, TOKENS, NEW = 64, 3, 40, 8
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""SGLang keeps states of convolutions in BF16 unless told."""
TRACK = ["--mamba-track-interval", str(PAGE), "--max-mamba-cache-size", "96"]
ORACLE = oracle(NEW)

NEXTN = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
LAZY = "extra_buffer_lazy"
"""A request has a second slot for states only where a page may end in a step, so that states kept wander."""
RIGHT = 1.5
"""Tokens of a step at least, of four."""


def variables_of(version: str, *others: str) -> dict[str, str]:
    """Environment of a server of a release, whose rows are exact and whose windows are NaN until they are filled."""
    env = environment(version) | FLOAT | HADAMARD | STRICT
    return with_plugins(env, "lossless_plugin", "no_gpu_plugin", *others)


@dataclass
class Turn:
    """What a server was asked and answered."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def texts(self) -> list[list[int]]:
        return [ids + one["output_ids"] for ids, one in zip(self.prompts, self.answers, strict=True)]


def ask(server: Server, prompts: list[list[int]], workers: int) -> Turn:
    with ThreadPoolExecutor(workers) as pool:
        answers = list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), prompts))
    return Turn(prompts, answers)


def opening() -> list[list[int]]:
    """First turns: some shorter than a window or than a sink, some that part behind a common beginning."""
    rng = random.Random(5)
    common = rng.choices(range(250), k=330)
    alone = [rng.choices(range(250), k=length) for length in (7, 40, 63, 64, 130, 333)]
    return alone + [common + rng.choices(range(250), k=length) for length in (90, 30)]


def conversations(model: Path, folder: Path, turns: int = TURNS, every: int = 1) -> list[Turn]:
    """Turns of conversations with stock SGLang, which goes on from its own answers."""
    rng, made, prompts = random.Random(6), list[Turn](), opening()[::every]
    with serve(model, folder / "stock", *STOCK, env=FLOAT) as server:
        for _ in range(turns):
            made.append(ask(server, prompts, 4))
            # A page ends within every answer, behind any of its tokens.
            ends = [-len(text) - rng.randrange(1, TOKENS) for text in made[-1].texts]
            news = [rng.choices(range(250), k=20 + (end - 20) % PAGE) for end in ends]
            prompts = [text + new for text, new in zip(made[-1].texts, news, strict=True)]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_models.hybrid_with_draft_layer("qwen3_next", tmp_path_factory.mktemp("next") / "model")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    return conversations(model, tmp_path_factory.mktemp("expected"))


def assert_turns_are_the_same(server: Server, expected: list[Turn], workers: int) -> list[dict[str, Any]]:
    """Ask every turn, which goes on from the states and windows of the one before; the answers."""
    turns = []
    for turn in expected:
        turns.append(ask(server, turn.prompts, workers))
        assert_same(turn.answers, turns[-1].answers, NEAR_TIE, DRIFT)
    assert refills(server) == 0
    if workers == 1:
        for before, turn in itertools.pairwise(turns):
            for text, prompt, answer in zip(before.texts, turn.prompts, turn.answers, strict=True):
                if prompt[: len(text)] == text:  # no near-tie parted them
                    # A tree of pairs of tokens knows one less, and the last token of an answer is never computed.
                    assert answer["meta_info"]["cached_tokens"] >= (len(text) - 2) // PAGE * PAGE
    assert server.alive()
    return [answer for turn in turns for answer in turn.answers]


@pytest.mark.parametrize(("strategy", "turns", "workers"), [("extra_buffer", TURNS, 1), (LAZY, 2, 4)])
def test_planned_drafts(
    strategy: str, turns: int, workers: int, model: Path, expected: list[Turn], tmp_path: Path
) -> None:
    """Chains; trees of several requests are those of ``test_hybrid_images.py``. Steps overlap, so that a request that
    has ended is verified once more."""
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps([text for turn in expected for text in turn.texts]))
    env = variables_of(installed(), "oracle_plugin", "overlapped_drafts_plugin")
    env |= {"ORACLE_PLAN": "chains", "ORACLE_TEXTS": str(texts)}
    args = [*INT2, *TRACK, *ORACLE, "--mamba-radix-cache-strategy", strategy]
    with serve(model, tmp_path / "log", *args, env=env) as server:
        assert 1.5 < per_step(assert_turns_are_the_same(server, expected[:turns], workers)) < NEW - 1


def test_a_draft_layer_of_the_model(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """The layer's own cache lies in the slots of the tokens, also of those that a prefix hit brings."""
    with serve(model, tmp_path / "log", *INT2, *TRACK, *NEXTN, env=variables_of(installed())) as server:
        assert per_step(assert_turns_are_the_same(server, expected[:2], 1)) > RIGHT
        assert "1 layers in torch.float32" in server.text()
        assert "states behind drafts" in server.text()


def test_wrong_drafts_of_a_model_beside(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """Next to all of EAGLE3's are rejected, so pages end behind the token that each step adds."""
    eagle3 = draft_models.eagle3_beside(tmp_path / "eagle3")
    args = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(eagle3)]
    with serve(model, tmp_path / "log", *INT2, *TRACK, *args, env=variables_of(installed())) as server:
        assert per_step(assert_turns_are_the_same(server, expected[:2], 4)) < 1.2


def test_a_draft_layer_of_a_dense_model(tmp_path: Path) -> None:
    """Qwen3.5 of text alone."""
    dense = draft_models.hybrid_with_draft_layer("qwen3_5_text", tmp_path / "model")
    expected = conversations(dense, tmp_path, turns=2, every=2)
    with serve(dense, tmp_path / "log", *INT2, *TRACK, *NEXTN, env=variables_of(installed())) as server:
        assert per_step(assert_turns_are_the_same(server, expected, 1)) > RIGHT
