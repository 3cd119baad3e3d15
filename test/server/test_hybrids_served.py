"""Models of linear and full attention layers behind int2 servers: answers are those of stock SGLang, in every turn.

Rows are lossless, and NaN where a window must be read; rings and sink blocks are NaN until they are filled. So whatever
a prefix hit brings back besides history rows shows: states, rings and sinks.
"""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_oscar.errors import EXIT_CODE
from support import hybrid_models
from support.api import retracted
from support.compare import LOGPROBS, assert_follows
from support.launch_cases import run_cases
from support.releases import environment, installed, needs_newer_python, served
from support.servers import (
    HADAMARD,
    IDENTITY,
    RETRACTED,
    STRICT,
    TWO_CORES,
    TWO_RANKS,
    Server,
    refills,
    serve,
    server_environment,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = str(Path(__file__).parents[1] / "support" / "lossless_plugin")
COMMON = ["--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "4", *COMMON]
DRIFT = 0.06
ROTATED = 0.25
"""Largest drift with rotations: 16-bit windows and outputs are rounded in another basis than stock's."""
TWO_HALVES = 0.1
"""With two ranks: each rounds its half of every sum to BF16."""
AGAIN = 0.125
"""Where requests that were retracted are computed again, in other chunks: stock that does so drifts by 0.074 itself at
one of these tokens, on a CPU with AMX."""
PAGE, TURNS, TOKENS = 64, 3, 24
ASKED = {"next_two_ranks": slice(0, None, 3), "next_lazy_states": slice(0, None, 2), "oldest": slice(1, None, 2)}
ASKED |= {"next_chunked_retracted": slice(0, None, 2), "qwen3_5_few_states": slice(1, None, 2)}
ASKED |= {name: slice(0, None, 3) for name in ("qwen3_5_text", "qwen3_5_moe_text_chunked", "nemotron_chunked")}
"""The beginnings that each configuration is asked: all of them are asked of some, and classes of text alone have the
states and layers of other configurations."""
GRID = {"nemotron_chunked": 128}
"""Tokens between states that are kept, where chunks of the linear layers are longer than pages."""
TWO_TURNS = {*ASKED} - {"next_chunked_retracted"}
"""Configurations whose conversations end with the first hit: what later ones are is one rank's, in any release."""
NO_OVERLAP = "--disable-overlap-schedule"
MISTAKES_STATES = "0.5.17"
"""The release whose prefix cache mistakes one state for another with overlap scheduling: int2 mode wants it off."""
NO_STATES_OF_TEXT = ("0.5.17", "0.5.18")
"""Releases whose prefix cache keeps no states of the classes of text alone."""
Request = list[int]


def ask(server: Server, prompts: list[Request], workers: int = 1) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, TOKENS, **LOGPROBS), prompts))


def opening() -> list[Request]:
    """First turns: of several lengths, some shorter than a window, some that part behind a common beginning."""
    rng = random.Random(5)
    common = rng.choices(range(250), k=420)
    alone = [rng.choices(range(250), k=length) for length in (40, 63, 64, 130, 333, 600)]
    return alone + [common + rng.choices(range(250), k=length) for length in (90, 150, 30)]


@dataclass
class Asked:
    """What a server was asked and answered, and how far turns reached back."""

    prompts: list[Request] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


def converse(server: Server, prompts: list[Request], workers: int, count: int = TURNS) -> list[Asked]:
    """Conversations of several turns, which go on from the server's own answers; one :class:`Asked` a turn."""
    rng, turns = random.Random(6), []
    for _ in range(count):
        answers = ask(server, prompts, workers)
        turns.append(Asked(prompts, answers))
        prompts = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
        # A page ends within every answer, behind any of its tokens.
        ends = [-len(prompt) - rng.randrange(1, TOKENS) for prompt in prompts]
        news = [20 + (end - 20) % PAGE + PAGE * rng.randrange(2) for end in ends]
        prompts = [prompt + rng.choices(range(250), k=new) for prompt, new in zip(prompts, news, strict=True)]
    return turns


def cached(turn: Asked) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in turn.answers]


CONFIGURATIONS: dict[str, tuple[str, str, list[str], dict[str, str], int]] = {
    "next_chunked_retracted": (
        "qwen3_next",
        installed(),
        ["--max-mamba-cache-size", "64", "--chunked-prefill-size", "128", "--mamba-max-states-per-path", "2"],
        IDENTITY | RETRACTED,
        4,
    ),
    "next_two_ranks": (
        "qwen3_next",
        installed(),
        ["--max-mamba-cache-size", "96", "--chunked-prefill-size", "128", *TWO_RANKS],
        IDENTITY | TWO_CORES,
        1,
    ),
    "qwen3_5_few_states": (
        "qwen3_5",
        installed(),
        ["--max-mamba-cache-size", "16", "--max-running-requests", "2"],
        HADAMARD,
        3,
    ),
    "qwen3_5_text": ("qwen3_5_text", installed(), ["--max-mamba-cache-size", "96"], IDENTITY, 2),
    "qwen3_5_moe_text_chunked": (
        "qwen3_5_moe_text",
        installed(),
        ["--max-mamba-cache-size", "64", "--chunked-prefill-size", "128"],
        IDENTITY,
        3,
    ),
    "nemotron_chunked": (
        "nemotron_h",
        installed(),
        ["--max-mamba-cache-size", "96", "--chunked-prefill-size", "256", "--mamba-track-interval", "128"],
        IDENTITY,
        1,
    ),
    "next_lazy_states": (
        "qwen3_next",
        installed(),
        ["--max-mamba-cache-size", "96", "--chunked-prefill-size", "128", *hybrid_models.LAZY],
        IDENTITY,
        1,
    ),
    "oldest": (
        "qwen3_next",
        served()[0],
        ["--max-mamba-cache-size", "96", "--chunked-prefill-size", "128"],
        IDENTITY,
        2,
    ),
}
"""By name: model, release, arguments, environment and requests at once."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_turn_equals_stock(name: str, tmp_path: Path) -> None:
    """Turns of conversations, and hits that begin where an earlier one ended: none computes an answer again."""
    model_name, version, args, variables, workers = CONFIGURATIONS[name]
    release = environment(version)
    model = hybrid_models.save(model_name, tmp_path / "model")
    env = release | STRICT | variables
    exact = variables.items() >= IDENTITY.items()
    drift = TWO_HALVES if "--tp-size" in args else DRIFT if exact else ROTATED
    if variables.items() >= RETRACTED.items():
        drift = max(drift, AGAIN)
    env["PYTHONPATH"] = os.pathsep.join([LOSSLESS, *filter(None, [release.get("PYTHONPATH")])])
    track = ["--mamba-track-interval", str(PAGE), *([NO_OVERLAP] if version == MISTAKES_STATES else [])]
    text = [] if model_name == "qwen3_5" else ["--skip-tokenizer-init"]
    with serve(model, tmp_path / "log", *INT2, *text, *track, *args, env=env) as server:
        assert "states of linear layers" in server.text()
        turns = converse(server, opening()[ASKED[name]], workers, 2 if name in TWO_TURNS else TURNS)
        longest = max(turns[-1].prompts, key=len)
        again = Asked([longest] * 2, [answer for _ in range(2) for answer in ask(server, [longest])])
        assert refills(server) == 0
        assert (retracted(server) > 0) == ("SGLANG_TEST_RETRACT" in variables)
        assert server.alive()
    if workers == 1:
        kept = GRID.get(name, PAGE)
        for before, turn in itertools.pairwise(turns):
            for prompt, answer, tokens in zip(before.prompts, before.answers, cached(turn), strict=True):
                # The last token of an answer is never computed, and states are kept at the ends of pages or chunks.
                assert tokens >= (len(prompt) + len(answer["output_ids"]) - 1) // kept * kept
    else:  # What is still there depends on the order in which requests met; what was asked last is.
        assert sum(tokens >= PAGE for tokens in cached(again)) > 0
    with serve(model, tmp_path / "stock", *STOCK, *text, env=release) as server:
        for turn in [*turns, again]:
            assert_follows(server, turn.prompts, turn.answers, drift if exact else drift / 2, drift)


@pytest.mark.parametrize("version", served())
def test_states_that_are_mistaken_or_not_kept_are_refused(version: str, tmp_path: Path) -> None:
    """With overlap scheduling and a prefix cache, where the release is at fault, and nowhere else; so are classes of
    which it keeps none."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    model = hybrid_models.save("qwen3_next", tmp_path / "model")
    base = ["--model-path", str(model), "--device", "cpu", *INT2]
    cases = [{"argv": [*base, *more]} for more in ([], [NO_OVERLAP], ["--disable-radix-cache"])]
    text = hybrid_models.save("qwen3_5_text", tmp_path / "text")
    cases.append({"argv": ["--model-path", str(text), "--device", "cpu", *INT2]})
    overlap, *others, of_text = run_cases(cases, server_environment(HADAMARD | environment(version)))
    if version in NO_STATES_OF_TEXT:
        assert of_text["status"] == EXIT_CODE, of_text["error"]
        assert "install sglang 0.5.19 or later" in of_text["error"].splitlines()[-1]
    else:
        assert of_text["status"] == 0, of_text["error"]
    for outcome in others:
        assert outcome["status"] == 0, outcome["error"]
    if version == MISTAKES_STATES:
        assert overlap["status"] == EXIT_CODE, overlap["error"]
        assert NO_OVERLAP in overlap["error"].splitlines()[-1]
    else:
        assert overlap["status"] == 0, overlap["error"]
