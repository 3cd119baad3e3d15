"""A serving process dumps what attention sees; a fit of the dump serves again with a 2-bit cache."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from oscar_rotation.dump import DumpReader
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.recipes import DEFAULT
from sglang_oscar.formats.model_identity import config_hash
from support.activations import Activations, activations, load
from support.models import COMMON, VOCABULARY, save
from support.servers import TWO_CORES, TWO_RANKS, Server, serve, server_environment

pytestmark = pytest.mark.server

STOCK = [] if torch.cuda.is_available() else ["--attention-backend", "torch_native"]
LAYERS, KV_HEADS = COMMON["num_hidden_layers"], COMMON["num_key_value_heads"]
LENGTHS = [300, 37, 520, 181, 260]
BF16_ERROR = 0.02


def prompts() -> list[list[int]]:
    """Random tokens, every prompt of its own length; the last begins like the first, which must not matter."""
    rng = random.Random(5)
    ids = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]
    ids[-1][:200] = ids[0][:200]
    return ids


def dump(model: Path, folder: Path, *args: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Serve with dumping until the dump is complete; returns the answers of the server, one after the end of it."""
    variables = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": str(sum(LENGTHS)), "DUMP_KVCACHE_DIR": str(folder)}
    log = folder.with_suffix(".log")
    with serve(model, log, *STOCK, "--skip-tokenizer-init", *args, env=variables | (env or {}), warm_up=True) as server:
        ids = prompts()
        answers = [server.generate(ids[0], 4)]
        assert json.loads((folder / "manifest.json").read_text())["complete"] is False
        with ThreadPoolExecutor(4) as pool:
            answers += pool.map(lambda one: server.generate(one, 4), ids[1:])
        assert "dump complete" in server.text()
        written = sorted(folder.rglob("*.pt"))
        answers.append(server.generate(ids[0], 4))
        assert sorted(folder.rglob("*.pt")) == written, "the server went on dumping"
        assert server.alive()
    assert answers[0]["output_ids"] == answers[-1]["output_ids"]
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, Activations]:
    """Prompt length -> queries, keys and values of a transformers forward pass."""
    loaded = load(model)
    return {len(ids): activations(loaded, ids) for ids in prompts()}


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps") / "one"
    dump(model, folder)
    return folder


def assert_dump(folder: Path, expected: dict[int, Activations]) -> None:
    """Every prompt is there once, in every layer, with the values that transformers computes."""
    reader = DumpReader(folder)
    assert reader.num_layers == LAYERS
    assert reader.manifest is not None
    assert reader.manifest.complete
    assert reader.manifest.tokens == sum(LENGTHS)
    assert (reader.manifest.q_heads, reader.manifest.kv_heads, reader.manifest.head_dim) == (4, KV_HEADS, 64)
    config = AutoConfig.from_pretrained(reader.manifest.model_id)
    assert reader.manifest.model_hash == config_hash(config.to_dict())
    assert reader.manifest.sm_scale == pytest.approx(64**-0.5)
    assert reader.has_output_readers
    weights = OutputWeights(reader.manifest.weights)
    for layer in range(LAYERS):
        torch.testing.assert_close(reader.output_reader(layer), weights.reader(layer, KV_HEADS, 64))
        seen = []
        for chunk in (reader.load(layer, index) for index in reader.fit_chunks()):
            begin = 0
            for length in chunk.seq_lens:
                for name, wanted in zip("qkv", expected[length][layer], strict=True):
                    got = getattr(chunk, name)[begin : begin + length].float()
                    error = (got - wanted.float()).norm() / wanted.float().norm()
                    assert error < BF16_ERROR, f"{name} of layer {layer}, prompt of {length}: {error:.4f}"
                seen.append(length)
                begin += length
        assert sorted(seen) == sorted(LENGTHS)


def test_dump_equals_transformers(one_rank: Path, expected: dict[int, Activations]) -> None:
    assert_dump(one_rank, expected)


def test_comparison_can_fail(one_rank: Path, expected: dict[int, Activations]) -> None:
    """Keys of another layer or before RoPE are far outside the tolerance."""
    shuffled = {length: layers[1:] + layers[:1] for length, layers in expected.items()}
    with pytest.raises(AssertionError, match="of layer 0"):
        assert_dump(one_rank, shuffled)


@pytest.mark.skipif(torch.cuda.is_available() or (os.cpu_count() or 1) < 2, reason="two ranks on two CPU cores")
def test_shards_of_two_ranks(model: Path, expected: dict[int, Activations], tmp_path: Path) -> None:
    """Each rank writes its own heads; gathered they are the same dump."""
    dump(model, tmp_path / "two", *TWO_RANKS, env=TWO_CORES)
    names = {path.name for path in (tmp_path / "two" / "layer_0" / "k").iterdir()}
    assert {"1.tp0of2.pt", "1.tp1of2.pt"} <= names
    assert_dump(tmp_path / "two", expected)


FILES = {
    "paper": ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"),
    "focus": ("k_rotation_focused_u_h_br.safetensors", "v_rotation_balanced_u_h_br.safetensors"),
}


@pytest.mark.parametrize("recipe", FILES)
def test_fit_serves(recipe: str, model: Path, one_rank: Path, tmp_path: Path) -> None:
    """``oscar fit`` on a dump in the public layout writes both files; a server that loads them answers."""
    public = shutil.copytree(one_rank, tmp_path / "public", ignore=shutil.ignore_patterns("manifest.json"))
    assert int(torch.load(public / "layer_0/seq_lens/0.pt").sum()) < min(LENGTHS), "chunk 0 is the short warm-up"
    command = [sys.executable, "-m", "oscar_tools", "fit", str(public), "--out", str(tmp_path)]
    # The default needs the model's output projections, and a public dump does not say which model it is of.
    command += ["--model", str(model)] if recipe == DEFAULT else ["--recipe", recipe]
    done = subprocess.run(
        command, env=server_environment({}), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr
    files = [tmp_path / name for name in FILES[recipe]]
    assert all(str(path) in done.stdout for path in files)
    env = {"SGLANG_OSCAR_K_ROTATION_PATH": str(files[0]), "SGLANG_OSCAR_V_ROTATION_PATH": str(files[1])}
    with serve(model, tmp_path / "log", "--kv-cache-dtype", "int2", "--skip-tokenizer-init", env=env) as server:
        answers = [generate_twice(server, ids) for ids in prompts()]
        assert server.alive()
        for path in files:
            assert str(path) in server.text()
    assert all(len(ids) == 8 for ids in answers)


def generate_twice(server: Server, ids: list[int]) -> list[int]:
    """Eight tokens, the same with and without a prefix hit for short prompts, whose windows cover everything."""
    first, again = (server.generate(ids, 8)["output_ids"] for _ in range(2))
    if len(ids) <= 256:
        assert first == again
    return first
