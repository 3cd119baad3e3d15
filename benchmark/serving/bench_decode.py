"""Milliseconds per generated token of one long request: stock BF16 SGLang against int2 mode, random weights.

Prints, for every context length, both times, their ratio, and the ratio of each to its byte bound: the bytes of
weights and of cached keys and values that a step must read, over the card's read bandwidth. Also records how the
start-up account of int2 mode compares with what the card reports, and how long the servers took to start.

``--server-args "--enable-torch-compile --torch-compile-max-bs 1" --server-env TORCHINDUCTOR_ENABLE_PDL=1`` measures
both with torch.compile.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from step_profile import profile_steps

from sglang_oscar.cpu_server import environment
from sglang_oscar.local_server import LocalServer, serve

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
TOKENS = 128


def weight_bytes(config: dict[str, Any]) -> int:
    """Bytes of BF16 weights that a decode step reads: all but the embedding."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = hidden * head * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"]
    return 2 * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


def kv_bytes(config: dict[str, Any], length: int, bits: float) -> float:
    """Bytes of the cached keys and values of one request."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * length * bits / 8


def generate(server: LocalServer, ids: list[int], tokens: int) -> float:
    """Seconds for a request that generates ``tokens`` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begin = time.perf_counter()
    requests.post(f"{server.url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=600)
    return time.perf_counter() - begin


def prompt(length: int) -> list[int]:
    """Token ids, the same ones for every call with a length."""
    rng = random.Random(length)
    return [rng.randrange(1000, 100000) for _ in range(length)]


def ms_per_token(server: LocalServer, length: int) -> float:
    """Decode time per token at a context of ``length`` tokens: long minus short generation on a cached prompt."""
    ids = prompt(length)
    generate(server, ids, 1)
    pairs = [(generate(server, ids, TOKENS + 1), generate(server, ids, 1)) for _ in range(3)]
    return 1e3 * min(long - short for long, short in pairs) / TOKENS


def used_bytes() -> int:
    """Bytes in use on the first GPU that this process sees."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def account(log: str) -> dict[str, float]:
    """What the start-up log of int2 mode says, in GiB."""
    pool = re.search(r"history pool: (\d+) tokens x (\d+) bytes = ([\d.]+) GiB", log)
    side = re.search(r"side buffers: ([\d.]+) GiB of a ([\d.]+) GiB budget", log)
    free = re.findall(r"avail mem=([\d.]+) GB", log)
    assert pool is not None
    assert side is not None
    tokens, size = int(pool[1]), float(pool[3])
    return {"tokens": tokens, "pool_gib": size, "side_gib": float(side[1]), "budget_gib": float(side[2]),
            "free_log_gib": [float(x) for x in free]}  # type: ignore[dict-item]  # fmt: skip


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    lengths: Annotated[str, typer.Option(help="context lengths, separated by commas")] = "30000,60000,100000",
    bandwidth: Annotated[float, typer.Option(help="read bandwidth of the card in TB/s")] = 4.6,
    baseline: Annotated[str, typer.Option(help="attention backend of stock SGLang")] = "flashinfer",
    modes: Annotated[str, typer.Option(help="bf16, int2 or both, separated by commas")] = "bf16,int2",
    server_args: Annotated[str, typer.Option(help="further flags for both servers")] = "",
    server_env: Annotated[str, typer.Option(help="NAME=VALUE for both servers, separated by spaces")] = "",
    steps: Annotated[bool, typer.Option(help="profile where a step goes at the longest length")] = True,
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("decode.json"),
) -> None:
    """Measure decode latency of one request end to end."""
    config = COMMON | SHAPES[shape]
    layers = config["num_hidden_layers"]
    sizes = [int(part) for part in lengths.split(",")]
    rotations = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}
    servers: dict[str, tuple[list[str], dict[str, str], float]] = {
        "bf16": (["--attention-backend", baseline], {}, 16.0),
        "int2": (["--kv-cache-dtype", "int2"], rotations, 2.25),
    }
    servers = {name: servers[name] for name in modes.split(",")}
    result = describe() | {"shape": shape, "bandwidth_tb_s": bandwidth, "baseline": baseline, "rows": [], "start_s": {}}
    times: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        common = ["--load-format", "dummy", "--skip-tokenizer-init", "--mem-fraction-static", "0.85"]
        common += server_args.split()
        extra = dict(pair.split("=", 1) for pair in server_env.split())
        for name, (args, env, _) in servers.items():
            begin = time.monotonic()
            with serve(
                folder, out.with_suffix(f".{name}.log"), [*common, *args], environment() | env | extra
            ) as server:
                result["start_s"][name] = round(time.monotonic() - begin, 1)
                if name == "int2":
                    result["account"] = account(server.text()) | {"used_gib": used_bytes() / 2**30}
                times[name] = {length: ms_per_token(server, length) for length in sizes}
                print(name, times[name], flush=True)
                if steps:
                    asking = partial(generate, server, prompt(sizes[-1]), 4 * TOKENS)
                    result[f"{name}_step"] = profile_steps(server, asking, layers)
                    print(name, json.dumps(result[f"{name}_step"]), flush=True)
    for length in sizes:
        row: dict[str, Any] = {"length": length}
        for name, (_, _, bits) in servers.items():
            bound = 1e3 * (weight_bytes(config) + kv_bytes(config, length, bits)) / (bandwidth * 1e12)
            taken = times[name][length]
            row |= {f"{name}_ms": round(taken, 3), f"{name}_of_bound": round(taken / bound, 2)}
        if len(servers) == 2:
            row["speedup"] = round(row["bf16_ms"] / row["int2_ms"], 2)
        result["rows"].append(row)
        print(row)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
