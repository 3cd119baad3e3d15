"""Models with sliding windows, prefill and decode apart: windows go over as SGLang's, answers are those of one server.

Rows of full layers are lossless, and NaN where a window of int2 mode must be read; so are rings, sink blocks and the
pool of layers with a sliding window until they are filled. Everything else is in float32, so that it does not depend on
what is computed at once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support import window_models
from support.compare import LOGPROBS, assert_follows, assert_same
from support.disaggregated import Pair, needs, serve_pair
from support.draft_models import gpt_oss_with_drafts
from support.models import VOCABULARY, build
from support.releases import installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif(installed() != "0.5.23", reason="served from SGLang 0.5.23"),
]
COMMON = ["--skip-tokenizer-init", "--dtype", "float32", "--moe-runner-backend", "triton"]
STOCK = ["--attention-backend", "intel_amx", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "4", *COMMON]
CHUNKS = ("--chunked-prefill-size", "128")
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
ENV = HADAMARD | STRICT | {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
ENV |= {"SGLANG_MIXED_KV_HP_DTYPE": "float16"}  # an eighth of the noise of bfloat16
WINDOW, PAGE, RECENT = 96, 64, 256
LENGTHS, TOKENS, LONG = (1, 20, PAGE, WINDOW - 6, WINDOW, 300, 10 * PAGE, 900), 24, WINDOW + 24
"""Prompts below, at and above the ends of sink, sliding and recent window; and short answers, and long ones, in which a
sliding window leaves the prompt, across pages."""


def gpt_oss(folder: Path) -> Path:
    """In float32: SGLang's class takes the dtype of its weights from the configuration alone."""
    build("gpt_oss").float().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Kind:
    """A class of models: what writes a small one, and how much rounding of 16-bit windows moves log probabilities."""

    save: Callable[[Path], Path]
    args: tuple[str, ...] = window_models.DRAWN
    plugins: tuple[str, ...] = ("gpt_oss_plugin", "drawn_weights_plugin")
    drift: float = 0.002


KINDS = {
    "gpt_oss": Kind(gpt_oss, (), ("gpt_oss_plugin",)),
    # Heads of 256 that queries are not scaled by, in what SGLang keeps in one pool.
    "gemma3": Kind(partial(window_models.save, "Gemma3ForCausalLM", query_pre_attn_scalar=100), drift=0.02),
    # Layers with a window have more query heads, and see a token more in Step-3.5.
    "laguna": Kind(partial(window_models.save, "LagunaForCausalLM")),
    "step3p5": Kind(partial(window_models.save, "Step3p5ForCausalLM")),
    # Keys of 192 channels and values of 128, twice the kv heads in layers with a window, and sink logits there.
    "mimo_v2_flash": Kind(
        partial(
            window_models.save, "MiMoV2FlashForCausalLM", swa_num_attention_heads=8, swa_num_key_value_heads=4
        )
    ),
}  # fmt: skip


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[number, *rng.choices(range(VOCABULARY), k=length - 1)] for number, length in enumerate(LENGTHS, 1)]


def ask(server: Server | Pair, workers: int, tokens: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), prompts()))


def on(*pairs: tuple[str, str]) -> Any:
    """Parameters ``name`` and ``backend``."""
    params = [pytest.param(name, backend, marks=needs(backend), id=f"{name}-{backend}") for name, backend in pairs]
    return pytest.mark.parametrize(("name", "backend"), params)


@on(
    ("gpt_oss", "mooncake_tcp"),
    ("gpt_oss", "nixl"),
    ("gemma3", "nixl"),
    ("laguna", "mooncake_tcp"),
    ("step3p5", "nixl"),
    ("mimo_v2_flash", "mooncake_tcp"),
)
def test_answers_are_those_of_stock(name: str, backend: str, tmp_path: Path) -> None:
    """One after the other; then four at a time, with chunks, hits on the prefill server, and requests that the decode
    server retracts."""
    kind, model = KINDS[name], KINDS[name].save(tmp_path / "model")
    env, args = with_plugins(ENV, *kind.plugins, "lossless_plugin"), (*INT2, *kind.args)
    with serve_pair(model, tmp_path, *args, backend=backend, env=env, prefill=CHUNKS, of_decode=RETRACTING) as pair:
        alone, together = ask(pair, 1, TOKENS), ask(pair, 4, LONG)
        assert together[-1]["meta_info"]["cached_tokens"] >= LENGTHS[-1] - RECENT - PAGE
        assert refills(pair.decode) > 0
        assert re.search(r"#retracted_reqs: [1-9]", pair.decode.text())
        assert pair.prefill.alive()
        assert pair.decode.alive()
    with serve(model, tmp_path / "stock", *STOCK, *kind.args, env=with_plugins({}, *kind.plugins)) as server:
        for answers in (alone, together):
            assert_follows(server, prompts(), answers, kind.drift, kind.drift)


@on(("gemma3", "nixl"), ("laguna", "mooncake_tcp"))
def test_two_bits_answer_as_one_server(name: str, backend: str, tmp_path: Path) -> None:
    """Rows as they are sent, which lossless ones are not."""
    kind, model = KINDS[name], KINDS[name].save(tmp_path / "model")
    env, args = with_plugins(ENV, *kind.plugins), (*INT2, *kind.args)
    with serve(model, tmp_path / "one", *args, env=env) as server:
        alone = ask(server, 2, TOKENS)
    with serve_pair(model, tmp_path, *args, backend=backend, env=env) as pair:
        assert_same(alone, ask(pair, 2, TOKENS), kind.drift, kind.drift)


@pytest.mark.parametrize("backend", [pytest.param("mooncake_tcp", marks=needs("mooncake_tcp"))])
def test_as_many_drafts_are_accepted(backend: str, tmp_path: Path) -> None:
    """As on one server, but in the step behind a retraction, which has nothing new to draft from."""
    model, drafts, _ = gpt_oss_with_drafts(tmp_path)
    env = with_plugins(
        ENV | {"SGLANG_SWA_EVICTION_INTERVAL": "1"}, "gpt_oss_plugin", "lossless_plugin", "no_gpu_plugin"
    )
    args = [*INT2, "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(drafts)]
    with serve(model, tmp_path / "one", *args, env=env) as server:
        expected = ask(server, 4, LONG)
    with serve_pair(model, tmp_path, *args, backend=backend, env=env, prefill=CHUNKS, of_decode=RETRACTING) as pair:
        alone, together = ask(pair, 1, LONG), ask(pair, 4, LONG)
        retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", pair.decode.text())))
    steps = [sum(one["meta_info"]["spec_verify_ct"] for one in answers) for answers in (expected, alone, together)]
    print(steps, retracted)
    for answers in (alone, together):
        assert_same(expected, answers, 0.002, 0.002)
    assert steps[0] < len(LENGTHS) * LONG / 1.5
    assert steps[1] == steps[0]
    assert retracted > 0
    assert steps[2] <= steps[0] + retracted
