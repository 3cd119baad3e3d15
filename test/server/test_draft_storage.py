"""Rows of draft models in storage: behind a hit as many drafts are accepted as behind one on the device, and none comes
back that another draft model has computed.

A draft model without its own rows would change no answer, and draft badly. Rows are lossless, and NaN where a window
must be read or as long as nobody has waited for them. ``test_draft_host_tier.py`` shows that the check can fail.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support import draft_models
from support.api import from_storage, wait_for
from support.compare import LOGPROBS, assert_same
from support.releases import installed
from support.servers import HADAMARD, STRICT, Server, serve
from support.speculation import INT2, NEAR_TIE, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif(installed() != "0.5.23", reason="served from SGLang 0.5.23"),
]
TIER = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-mem-layout", "page_first"]
TIER += ["--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "4096", "--hicache-ratio", "4"]
STATES = ["--mamba-track-interval", "64", "--max-mamba-cache-size", "16", "--max-running-requests", "2"]
CHAIN = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
ASKED, LENGTH, TOKENS, PAGE = 2, 700, 40, 64
STORED = (LENGTH - 256) // PAGE * PAGE
"""What a hit on a prompt may have."""


def prompts() -> list[list[int]]:
    rng = random.Random(37)
    return [[number, *rng.choices(range(250), k=LENGTH - 1)] for number in range(1, ASKED + 1)]


def ask(server: Server) -> list[dict[str, Any]]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in prompts()]


def steps(answers: list[dict[str, Any]]) -> list[int]:
    """Steps of verification of each answer: the fewer, the more drafts were accepted."""
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


def eagle(drafts: Path) -> list[str]:
    return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(drafts), *CHAIN]


def nextn(folder: Path) -> tuple[Path, list[str]]:
    model = draft_models.hybrid_with_draft_layer("qwen3_next", folder / "hybrid")
    return model, ["--speculative-algorithm", "NEXTN", *CHAIN, *STATES]


def dense(folder: Path) -> tuple[Path, list[str]]:
    model, drafts, _ = draft_models.llama_with_drafts(folder / "llama")
    return model, eagle(drafts)


@contextmanager
def server_on(folder: Path, model: Path, log: Path, *args: str, **variables: str) -> Iterator[Server]:
    """A server that stores pages in ``folder``."""
    env = HADAMARD | STRICT | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)} | variables
    env |= {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    env = with_plugins(
        env, "lossless_plugin", "late_host_plugin", "roomy_host_plugin", "no_gpu_plugin", "fp8_drafts_plugin"
    )
    with serve(model, log, *INT2, *TIER, *args, env=env) as server:
        yield server
        assert server.alive()


def pages(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files of rows and of drafts' rows, by SGLang's name of them."""
    drafts = sorted(folder.glob("*.draft*.bin"))
    return sorted({*folder.glob("*.bin")} - {*folder.glob("*.mamba*.bin")} - {*drafts}), drafts


def ask_twice(folder: Path, server: Server) -> list[dict[str, Any]]:
    """Answers behind hits on the device to prompts whose pages are all in ``folder`` thereafter."""
    assert from_storage(ask(server)) == [0] * ASKED
    wait_for(lambda: min(map(len, pages(folder))) >= ASKED * (LENGTH // PAGE), "pages in storage")
    answers = ask(server)
    assert min(answer["meta_info"]["cached_tokens"] for answer in answers) >= STORED
    assert from_storage(answers) == [0] * ASKED
    return answers


def assert_same_drafts(device: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """That answers behind hits in storage are those behind hits on the device and took as many steps, which are few."""
    assert min(from_storage(answers)) >= STORED
    assert_same(device, answers, NEAR_TIE, NEAR_TIE)
    assert steps(answers) == steps(device)
    assert max(steps(answers)) < TOKENS / 1.3


def test_acceptance_behind_a_hit_in_storage(tmp_path: Path) -> None:
    """Of a server whose model and draft model are copies of those that were stored; one whose draft model was trained
    on finds nothing."""
    (model, args), folder = dense(tmp_path), tmp_path / "store"
    drafts = tmp_path / "llama" / "eagle"
    with server_on(folder, model, tmp_path / "first", *args) as server:
        device = ask_twice(folder, server)
    copies = [shutil.copytree(of, tmp_path / "copies" / of.name) for of in (model, drafts)]
    with server_on(folder, copies[0], tmp_path / "second", *eagle(copies[1])) as server:
        assert_same_drafts(device, ask(server))
    trained = draft_models.trained(drafts, tmp_path / "trained")
    with server_on(folder, model, tmp_path / "third", *eagle(trained)) as server:
        assert from_storage(ask(server)) == [0] * ASKED


def test_rows_of_drafts_in_fp8(tmp_path: Path) -> None:
    """Are no rows in the draft model's own type, nor the other way round."""
    (model, args), folder = dense(tmp_path), tmp_path / "store"
    fp8 = [*args, *draft_models.FP8_CACHE]
    with server_on(folder, model, tmp_path / "own", *args) as server:
        ask_twice(folder, server)
    own = {path.name for path in folder.glob("*.bin")}
    with server_on(folder, model, tmp_path / "first", *fp8) as server:
        device = ask_twice(folder, server)
    for name in own:
        (folder / name).unlink()
    with server_on(folder, model, tmp_path / "second", *fp8) as server:
        assert_same_drafts(device, ask(server))


def test_rows_of_drafts_beside_states(tmp_path: Path) -> None:
    """Of a hybrid model with its own draft layer."""
    (model, args), folder = nextn(tmp_path), tmp_path / "store"
    with server_on(folder, model, tmp_path / "first", *args) as server:
        device = ask_twice(folder, server)
    with server_on(folder, model, tmp_path / "second", *args) as server:
        assert_same_drafts(device, ask(server))
