"""Hybrid models as published, which see images, with drafts and host memory: answers are those of stock SGLang.

Conversations of three turns, with images and without. Rows are lossless, and NaN where a window must be read; rings and
sink blocks are NaN until they are filled, and so is what comes from the host as long as nobody has waited for it.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from support import draft_models, hybrid_models, vision_models
from support.api import from_host, retracted
from support.compare import LOGPROBS, assert_same, first_difference
from support.releases import environment, installed, needs_newer_python, served
from support.servers import HADAMARD, RETRACTED, STRICT, Server, refills, serve
from support.speculation import oracle, per_step, with_plugins
from support.vision_models import IMAGE, letters

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--dtype", "float32"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "7", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
TRACK = ["--mamba-track-interval", "64", "--max-mamba-cache-size", "96"]
NEXTN = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
NEXTN += ["--speculative-num-draft-tokens", "4"]
COOKBOOK = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder", *NEXTN, "--page-size", "64"]
COOKBOOK += ["--mamba-radix-cache-strategy", "extra_buffer", "--enable-hierarchical-cache"]
"""What SGLang's cookbook sets for Qwen3.6-35B-A3B."""
SMALL = ["--max-total-tokens", "1536", "--max-running-requests", "2", "--max-mamba-cache-size", "16"]
SMALL += ["--hicache-ratio", "6", "--mamba-track-interval", "64"]
"""Tokens of some of the conversations, sink blocks for four, and states for next to none but those that run."""
ORACLE = oracle(8)
CHUNKS = ["--chunked-prefill-size", "128"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
NEAR_TIE = DRIFT = 0.01
TURNS, TOKENS, PAGE = 3, 32, 64
Picture = tuple[int, int, int]
"""Seed of its pixels, width and height."""
Prompt = tuple[str, list[Picture]]


def opening() -> list[Prompt]:
    """First turns: an image that begins a prompt, in two shapes, and one behind the sink; two in one prompt; one in a
    prompt below a sink; and text alone."""
    wide, tall, small, other = (0, 320, 256), (1, 256, 320), (2, 96, 64), (3, 320, 256)
    question = letters(300, seed=1)
    return [
        (IMAGE + question, [wide]),
        (IMAGE + question, [tall]),
        (letters(150, seed=2) + IMAGE + letters(90, seed=3), [wide]),
        (letters(20, seed=4) + IMAGE * 2 + letters(300, seed=5), [wide, other]),
        (letters(20, seed=4) + IMAGE, [small]),
        (letters(333, seed=6), []),
        (letters(40, seed=7), []),
    ]


@dataclass
class Turn:
    """What a server was asked and answered."""

    prompts: list[Prompt]
    answers: list[dict[str, Any]] = field(default_factory=list)


def ask(server: Server, prompts: list[Prompt], workers: int) -> Turn:
    def one(prompt: Prompt) -> dict[str, Any]:
        images = [vision_models.image(*picture) for picture in prompt[1]]
        return vision_models.ask(server, (prompt[0], images), TOKENS, **LOGPROBS)

    with ThreadPoolExecutor(workers) as pool:
        return Turn(prompts, list(pool.map(one, prompts)))


def next_turn(turn: Turn) -> list[Prompt]:
    """The same conversations with their answers and some more, in the second turn of some with one more image."""
    following, late = [], (9, 96, 128)
    for number, ((text, pictures), answer) in enumerate(zip(turn.prompts, turn.answers, strict=True)):
        shows = number % 3 == 0 and late not in pictures
        more = letters(20 + number * 13, seed=number) + IMAGE * shows
        following.append((text + answer["text"] + more, pictures + [late] * shows))
    return following


def expanded(prompt: Prompt, answer: dict[str, Any]) -> list[int]:
    """Token ids of a prompt and its answer, with as many for each image as it has tokens."""
    first, *others = prompt[0].split(IMAGE)
    begin, token, end = (f"<|{name}|>" for name in ("vision_start", "image_pad", "vision_end"))
    texts = [first]
    for text, (_, width, height) in zip(others, prompt[1], strict=True):
        texts += [begin, token * (width // 32 * (height // 32)), end, text]
    return vision_models.tokenizer()("".join(texts))["input_ids"] + answer["output_ids"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    return draft_models.hybrid_with_draft_layer("qwen3_5_moe", folder, **hybrid_models.QWEN3_6)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """Turns of conversations with stock SGLang, which go on from its own answers."""
    turns, prompts = list[Turn](), opening()
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *STOCK, env=FLOAT) as server:
        for _ in range(TURNS):
            turns.append(ask(server, prompts, 7))
            prompts = next_turn(turns[-1])
    assert first_difference(*turns[0].answers[:2]), "images do not show in the answers"
    return turns


OTHERS = [one for one in served() if one != installed()]
CONFIGURATIONS: dict[str, tuple[str, list[str], dict[str, str], int, int]] = {
    "planned_drafts": (installed(), [*TRACK, *ORACLE, *CHUNKS], RETRACTED, 4, TURNS),
    "cookbook": (installed(), [*COOKBOOK, *SMALL], {}, 2, TURNS),
    **{one: (one, [*TRACK, *NEXTN, *CHUNKS, "--disable-overlap-schedule"], RETRACTED, 4, 2) for one in OTHERS},
}
"""By name: release, arguments, variables, requests at once, and turns. Chunks end within images."""
PLUGINS = ("lossless_plugin", "late_host_plugin", "roomy_host_plugin", "oracle_plugin", "no_gpu_plugin")
RIGHT = 1.8
"""Tokens of a step at least, of four; with rows of drafts that stay on the host there are 1.6."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_turn_equals_stock(name: str, model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """Hits go on from states with the sinks, windows and rows of drafts that belong to them."""
    version, args, variables, workers, count = CONFIGURATIONS[name]
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    texts, known = tmp_path / "texts.json", list[list[int]]()
    for turn in expected:
        known += map(expanded, turn.prompts, turn.answers)
    texts.write_text(json.dumps(known))
    env = environment(version) | FLOAT | HADAMARD | STRICT | variables | {"ORACLE_TEXTS": str(texts)}
    turns = []
    with serve(model, tmp_path / "log", *INT2, *args, env=with_plugins(env, *PLUGINS)) as server:
        for turn in expected[:count]:
            turns.append(ask(server, turn.prompts, workers))
            assert_same(turn.answers, turns[-1].answers, NEAR_TIE, DRIFT)
        answers = [answer for turn in turns for answer in turn.answers]
        print(per_step(answers), sum(from_host(answers)))
        assert per_step(answers) > RIGHT
        assert refills(server) == 0
        assert (retracted(server) > 0) == (variables == RETRACTED)
        assert server.alive()
    if name == "cookbook":
        assert_hosted(expected, turns)


def assert_hosted(expected: list[Turn], turns: list[Turn]) -> None:
    """Next to all that was computed comes back from the host, answers included."""
    for said, before, turn in zip(expected, turns, turns[1:], strict=False):
        hits = [answer["meta_info"]["cached_tokens"] for answer in turn.answers]
        for x, y, hit in zip(said.answers, before.answers, hits, strict=True):
            if x["output_ids"] == y["output_ids"]:  # no near-tie parted them
                # A tree of pairs of tokens knows one less, and the last token of an answer is never computed.
                assert hit >= (y["meta_info"]["prompt_tokens"] + TOKENS - 2) // PAGE * PAGE
        assert sum(from_host(turn.answers)) > 0.8 * sum(hits)
