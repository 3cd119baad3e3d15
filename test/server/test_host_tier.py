"""Rows that come back from host memory (``--enable-hierarchical-cache``) give the answers of rows that never left.

Rows are lossless, and NaN where a window must be read, as long as nobody has waited for a layer that is being loaded,
and in sink blocks that are not filled. Log probabilities are compared with those of stock SGLang.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import recipe_rotation
from support.api import from_host, loads, wait_for
from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY
from support.releases import environment, needs_newer_python, served
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import plugins, with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LATE = plugins("lossless_plugin", "late_host_plugin", "roomy_host_plugin")
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "6"]
SMALL_POOL = ["--max-total-tokens", "2560", "--max-running-requests", "2"]
"""Tokens of fewer than three of the conversations, and four sink blocks for all of them."""
CONVERSATIONS, LENGTH = 5, 900
NEAR_TIE = DRIFT = 0.06
TOKENS = 12


def conversations(count: int = CONVERSATIONS, length: int = LENGTH, seed: int = 11) -> list[list[int]]:
    """Prompts that have no first token in common."""
    rng = random.Random(seed)
    return [[number, *(rng.randrange(VOCABULARY) for _ in range(length - 1))] for number in range(1, count + 1)]


def ask(server: Server, prompts: list[list[int]], workers: int = 1, tokens: int = TOKENS) -> list[dict]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), prompts))


@pytest.fixture(scope="module")
def expected(stock_qwen3: Server) -> list[dict]:
    """What stock SGLang answers to the conversations."""
    return ask(stock_qwen3, conversations(), workers=2)


CONFIGURATIONS: dict[str, tuple[str, dict[str, str], int]] = {
    "write_back_layer_first_chunked_mixed": (
        "--hicache-write-policy write_back --hicache-mem-layout layer_first "
        "--chunked-prefill-size 128 --enable-mixed-chunk",
        {},
        4,
    ),
    "selective_direct_large_pages_no_overlap": (
        "--hicache-write-policy write_through_selective --hicache-io-backend direct "
        "--hicache-mem-layout page_first_direct --page-size 128 --disable-overlap-schedule",
        {"SGLANG_OSCAR_RECOMPUTE_RECENT": "0"},
        2,
    ),
    "rows_of_many_sizes_small_windows": (
        "--hicache-mem-layout layer_first --hicache-io-backend direct",
        {"SGLANG_MIXED_KV_PREFIX_TOKENS": "16", "SGLANG_MIXED_KV_RECENT_TOKENS": "24"},
        2,
    ),
}


def mixed_files(folder: Path) -> dict[str, str]:
    """Rotations under which layers and sides have rows of four sizes, and kv heads of one layer of two."""
    paths = {}
    for side, bits in {"k": (2, (4, 2), 3), "v": (3, 2, 16)}.items():
        paths[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(folder / f"{side}.safetensors")
        rotation = recipe_rotation("hadamard", num_layers=3, head_dim=64, side=side)
        save_rotation_file(folder / f"{side}.safetensors", replace(rotation, bits=bits))
    return paths


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hits_on_the_host(name: str, qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Five conversations, a pool for fewer than three, asked again in turn: each answer is that of stock SGLang."""
    args, env, workers = CONFIGURATIONS[name]
    given = [*INT2, *SMALL_POOL, *TIER, *args.split()]
    rotations = mixed_files(tmp_path) if "many_sizes" in name else HADAMARD
    with serve(qwen3, tmp_path / "log", *given, env=LATE | rotations | STRICT | env) as server:
        assert "int2 memory: host tier: " in server.text()
        # Each three times running: the selective policy writes what has been hit.
        thrice = [prompt for prompt in conversations() for _ in range(3)]
        assert_same([one for one in expected for _ in range(3)], ask(server, thrice, workers), NEAR_TIE, DRIFT)
        # In turn, or a beginning would lie on the device still.
        again = ask(server, conversations())
        assert_same(expected, again, NEAR_TIE, DRIFT)
        hits = from_host(again)
        assert sum(hit >= 512 for hit in hits) >= CONVERSATIONS - 1, f"tokens from the host {hits}"
        at_once = ask(server, conversations(), workers)
        assert_same(expected, at_once, NEAR_TIE, DRIFT)
        assert any(from_host(at_once))
        assert refills(server) > 0
        assert server.alive()


def test_who_does_not_wait_is_seen(qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """The check can fail: attention that does not wait reads rows that are not there yet."""
    env = LATE | HADAMARD | {"LATE_HOST_NOBODY_WAITS": "1"}
    with serve(qwen3, tmp_path / "log", *INT2, *SMALL_POOL, *TIER, env=env) as server:
        assert_same(expected, ask(server, conversations()), NEAR_TIE, DRIFT)
        with pytest.raises(requests.HTTPError):
            ask(server, conversations(), tokens=2)
        assert "the model's output is not a number (NaN)" in server.text()


@pytest.mark.parametrize("version", served())
def test_releases(version: str, qwen3: Path, tmp_path: Path) -> None:
    """Rows as the codec makes them: a hit on the host answers bit for bit like one on the device, also when the working
    set is several times both pools, and nothing stays behind."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    first, *others = conversations(16)
    # Nothing is computed again that is then read in 2 bits: sinks have blocks enough, and hits are as long as can be.
    args = [*INT2, "--max-total-tokens", "2560", "--max-running-requests", "16"]
    args += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
    variables = HADAMARD | STRICT | {"SGLANG_OSCAR_RECOMPUTE_RECENT": "0"}
    env = with_plugins(environment(version, **variables), "roomy_host_plugin")
    with serve(qwen3, tmp_path / "log", *args, env=env) as server:
        ask(server, [first])
        (device,) = ask(server, [first])
        ask(server, others[:4])
        (host,) = ask(server, [first])
        assert device["meta_info"]["cached_tokens"] >= 832
        assert from_host([device, host]) == [0, host["meta_info"]["cached_tokens"]]
        assert host["meta_info"]["output_token_logprobs"] == device["meta_info"]["output_token_logprobs"]
        for _ in range(2):  # thirteen thousand tokens, twice, in turn: the host has room for five
            answers = ask(server, others, workers=4)
        assert any(from_host(ask(server, others[-3:])))
        assert all(len(answer["output_ids"]) == TOKENS for answer in answers)
        assert refills(server) == 0
        server.flush()
        wait_for(lambda: loads(server) == (0, 0), "an empty server")
        ask(server, [first])
        assert server.alive()
