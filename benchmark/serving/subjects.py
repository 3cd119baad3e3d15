"""What the serving benchmarks measure, models of random weights in the shapes of real ones under both caches, and
what they ask."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sglang_oscar.cpu.server import has_gpu

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-4b": {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    "qwen3-8b": {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "qwen3-32b": {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151645, "bos_token_id": 151643,
}  # fmt: skip
SERVER = ["--load-format", "dummy", "--skip-tokenizer-init", "--mem-fraction-static", "0.85"]


class Mode(NamedTuple):
    """A cache: flags and environment of a server, and bits per cached element."""

    args: list[str]
    env: dict[str, str]
    bits: float


BASELINE = "flashinfer" if has_gpu() else "torch_native"
"""Attention backend of stock SGLang: its best one for these shapes, and on a CPU one that runs on any."""
HADAMARD = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}
MODES = {
    "bf16": Mode(["--attention-backend", BASELINE], {}, 16.0),
    "fp8": Mode(["--attention-backend", BASELINE, "--kv-cache-dtype", "fp8_e4m3"], {}, 8.0),
    "int2": Mode(["--kv-cache-dtype", "int2"], HADAMARD, 2.25),
    "k3v2": Mode(["--kv-cache-dtype", "int2"], HADAMARD | {"SGLANG_OSCAR_K_BITS": "3"}, 2.75),
    "k4v2": Mode(["--kv-cache-dtype", "int2"], HADAMARD | {"SGLANG_OSCAR_K_BITS": "4"}, 3.25),
}


def write_model(folder: Path, shape: str) -> None:
    """A model folder that a server with :data:`SERVER` loads: a config without weights."""
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer beside a model of :func:`write_model`: every id is a word, so that every answer is text."""
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(int(COMMON["vocab_size"]))}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{COMMON['eos_token_id']}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_draft_model(folder: Path, shape: str) -> None:
    """The same for a draft layer of EAGLE3, which drafts from 32,000 of the model's tokens, as trained ones do."""
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config = COMMON | SHAPES[shape] | own | {"draft_vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))


def asking(ids: list[int], tokens: int) -> dict[str, Any]:
    """Body of a request to /generate for exactly ``tokens`` tokens."""
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


async def send_all(url: str, lengths: list[int], tokens: int) -> list[int]:
    """Send a request for every prompt length at once, each with a prompt of its own, and wait for all.

    Returns:
        their HTTP statuses.
    """

    async def one(session: aiohttp.ClientSession, number: int, length: int) -> int:
        async with session.post(f"{url}/generate", json=asking(prompt(number, length), tokens)) as reply:
            await reply.read()
            return reply.status

    limit = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
        return await asyncio.gather(*(one(session, number, length) for number, length in enumerate(lengths)))


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids, the same ones for every call with the same arguments."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 100000) for _ in range(length)]
