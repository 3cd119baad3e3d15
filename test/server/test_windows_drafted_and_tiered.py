"""gpt-oss with speculative decoding and host memory: answers are those of stock SGLang without either, in every turn.

Drafts are right or wrong by plan, or those of draft models. Rows are lossless, and NaN where a window of int2 mode must
be read; rings, sink blocks and the pool of layers with a sliding window are NaN until they are filled, and so is what
comes from the host until somebody waits for it. Sliding windows are freed as soon as nobody reads them.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import recipe_rotation
from support.api import from_host, retracted
from support.compare import assert_same
from support.draft_models import gpt_oss_with_drafts
from support.models import VOCABULARY
from support.releases import environment, installed, needs_newer_python, served
from support.servers import HADAMARD, RETRACTED, STRICT, Server, refills, serve
from support.speculation import INT2, SMALL, ask, oracle, per_step, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--moe-runner-backend", "triton"]
STOCK = ["--attention-backend", "intel_amx", "--skip-tokenizer-init", "--dtype", "float32", *COMMON]
SIZES = ["--page-size", "16", "--chunked-prefill-size", "128", *COMMON]
TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--max-total-tokens", "1024"]
TIER += ["--max-running-requests", "2"]
"""Tokens of two or three of the conversations, and sink blocks for four."""
ENV = HADAMARD | STRICT | SMALL | {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
ENV |= {"SGLANG_MIXED_KV_HP_DTYPE": "float16"}  # an eighth of the noise of bfloat16
PLUGINS = ("gpt_oss_plugin", "lossless_plugin", "no_gpu_plugin")
NEAR_TIE = DRIFT = 0.002
"""A sliding window of one token less shifts log probabilities by 0.018."""
TURNS, TOKENS, NEW, RECENT, PAGE = 3, 60, 8, 24, 16
RIGHT = 1.5
"""Tokens of a step at least, of four."""


class Models(NamedTuple):
    """A model, and draft models for it."""

    model: Path
    eagle: Path
    eagle3: Path


class Turn(NamedTuple):
    """What a server was asked and answered."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(*gpt_oss_with_drafts(tmp_path_factory.mktemp("gpt_oss")))


@pytest.fixture(scope="module")
def expected(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """Conversations with stock SGLang; prompts below, at and above the ends of sink, sliding and recent window."""
    rng, turns = random.Random(6), list[Turn]()
    prompts = [rng.choices(range(VOCABULARY), k=length) for length in (1, 15, 24, 70, 97, 200, 330)]
    folder = tmp_path_factory.mktemp("stock")
    with serve(models.model, folder / "log", *STOCK, env=with_plugins({}, "gpt_oss_plugin")) as server:
        for _ in range(TURNS):
            turns.append(Turn(prompts, ask(server, prompts, 4, TOKENS)))
            said = zip(prompts, turns[-1].answers, strict=True)
            prompts = [ids + one["output_ids"] + rng.choices(range(VOCABULARY), k=9) for ids, one in said]
    return turns


def assert_turns_are_the_same(server: Server, expected: list[Turn], workers: int) -> list[dict[str, Any]]:
    """Ask every turn, which hits what the one before left; the answers."""
    given = []
    for number, turn in enumerate(expected):
        answers = ask(server, turn.prompts, workers, TOKENS)
        assert_same(turn.answers, answers, NEAR_TIE, DRIFT)
        for prompt, answer in zip(turn.prompts, answers, strict=True):
            hit = answer["meta_info"]["cached_tokens"]
            assert number == 0 or hit >= len(prompt) - RECENT - 2 * PAGE, (number, len(prompt), hit)
        given += answers
    assert server.alive()
    return given


@pytest.mark.parametrize("version", dict.fromkeys((installed(), served()[0])))
def test_planned_drafts(version: str, models: Models, expected: list[Turn], tmp_path: Path) -> None:
    """Chains of which some tokens are right; requests are retracted."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    texts = tmp_path / "texts.json"
    known = [ids + one["output_ids"] for turn in expected for ids, one in zip(*turn, strict=True)]
    texts.write_text(json.dumps(known))
    plan = {"ORACLE_PLAN": "chains", "ORACLE_TEXTS": str(texts)} | RETRACTED
    env = with_plugins(environment(version) | ENV | plan, *PLUGINS, "oracle_plugin")
    args = [*oracle(NEW), "--speculative-ngram-max-bfs-breadth", "1"]
    with serve(models.model, tmp_path / "log", *INT2, *SIZES, *args, env=env) as server:
        assert 1.5 < per_step(assert_turns_are_the_same(server, expected, 3)) < NEW - 1
        assert retracted(server) > 0


def test_wrong_drafts_of_a_model(models: Models, expected: list[Turn], tmp_path: Path) -> None:
    """Next to all of EAGLE3's are rejected; EAGLE's, which are right, are among the hits on the host."""
    args = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(models.eagle3)]
    with serve(models.model, tmp_path / "log", *INT2, *SIZES, *args, env=with_plugins(ENV, *PLUGINS)) as server:
        assert per_step(assert_turns_are_the_same(server, expected[:2], 3)) < 1.2
        assert "1 layers in torch.float32" in server.text()


def mixed_rows(folder: Path) -> dict[str, str]:
    """Rotations under which layers and sides have rows of several sizes."""
    paths = {}
    for side, bits in {"k": (2, 4), "v": (3, 16)}.items():
        path = folder / f"{side}.safetensors"
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(path)
        rotation = recipe_rotation("hadamard", num_layers=2, head_dim=64, side=side)
        save_rotation_file(path, replace(rotation, bits=bits, layer_ids=(1, 3)))
    return paths


TIERS: dict[str, tuple[str, list[str]]] = {
    "mixed_rows_layer_first": (installed(), ["--hicache-mem-layout", "layer_first"]),
    "write_back_oldest": (served()[0], ["--hicache-write-policy", "write_back", "--hicache-io-backend", "direct"]),
    "drafts": (installed(), ["--speculative-algorithm", "EAGLE"]),
}
"""By name: release and arguments."""


@pytest.mark.parametrize("name", TIERS)
def test_hits_on_the_host(name: str, models: Models, expected: list[Turn], tmp_path: Path) -> None:
    """A pool for some of the conversations: what comes back brings its sliding windows, or is no hit."""
    version, args = TIERS[name]
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    if "drafts" in name:
        args = [*args, "--speculative-draft-model-path", str(models.eagle)]
    env = environment(version) | ENV | (mixed_rows(tmp_path) if "mixed" in name else {})
    env = with_plugins(env, *PLUGINS, "late_host_plugin", "roomy_host_plugin")
    with serve(models.model, tmp_path / "log", *INT2, *SIZES, *TIER, *args, env=env) as server:
        answers = assert_turns_are_the_same(server, expected, 2)
        hits = from_host(answers)
        print("from host", hits)
        assert sum(hit > 96 for hit in hits) >= 4, f"tokens from the host {hits}"
        assert refills(server) > 0
        if "drafts" in name:
            assert per_step(answers) > RIGHT
