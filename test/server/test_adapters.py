"""LoRA adapters: with exact rows they are stock SGLang's answers, whatever other adapter has read the same prompt."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.compare import LOGPROBS, assert_same
from support.models import COMMON, VOCABULARY
from support.servers import EXACT, STRICT, Server, refills, serve

pytestmark = pytest.mark.server
GPU = torch.cuda.is_available()
PRODUCTS = "triton" if GPU else "torch_native"
"""Of adapters, and the attention of stock SGLang."""
ARGS = ["--skip-tokenizer-init", "--enable-fp32-lm-head", "--lora-backend", PRODUCTS]
NEAR_TIE = DRIFT = 0.15 if GPU else 0.06
NAMES = (None, "first", "second")
RANK, TOKENS = 8, 16


def adapter(folder: Path, seed: int) -> Path:
    """An adapter of queries, values and outputs that changes what is said, as PEFT writes it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden, d = COMMON["hidden_size"], COMMON["head_dim"]
    q, kv = (COMMON[name] * d for name in ("num_attention_heads", "num_key_value_heads"))
    weights = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for name, rows, columns in (("q_proj", q, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, q)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / 8
            weights[f"{place}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 8
    save_file({name: x.bfloat16() for name, x in weights.items()}, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    said |= {"target_modules": ["q_proj", "v_proj", "o_proj"], "lora_dropout": 0.0, "base_model_name_or_path": ""}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def ask(server: Server, workers: int) -> list[dict]:
    """Three prompts by the model and by each adapter, in turn."""
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (90, 420, 700)]
    asked = [(ids, name) for ids in prompts for name in NAMES]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda one: server.generate(one[0], TOKENS, lora_path=one[1], **LOGPROBS), asked))


def test_adapters_answer_as_stock(qwen3: Path, tmp_path: Path) -> None:
    """Cold and with prefix hits, one at a time and together."""
    paths = [f"{name}={adapter(tmp_path / name, seed)}" for seed, name in enumerate(NAMES) if name]
    args = [*ARGS, "--enable-lora", "--max-loras-per-batch", "3", "--lora-paths", *paths]
    with serve(qwen3, tmp_path / "stock.log", *args, "--attention-backend", PRODUCTS) as server:
        expected = ask(server, 1)
    said = [answer["output_ids"] for answer in expected]
    assert all(len({tuple(ids) for ids in said[at : at + 3]}) == 3 for at in range(0, 9, 3))
    # Few sink blocks: those of a hit are computed again, by its adapter.
    int2 = ["--kv-cache-dtype", "int2", "--max-running-requests", "2"]
    with serve(qwen3, tmp_path / "log", *args, *int2, env=EXACT | STRICT) as server:
        for workers in (1, 4):
            got = ask(server, workers)
            assert_same(expected, got, NEAR_TIE, DRIFT)
        assert any(answer["meta_info"]["cached_tokens"] for answer in got)
        assert refills(server) > 0
        assert server.alive()
