"""Milliseconds per generated token of one long request: stock BF16 SGLang against int2 mode, random weights.

Prints, for every context length, both times, their ratio, and the ratio of each to its byte bound: the bytes of
weights and of cached keys and values that a step must read, over the card's read bandwidth. Also records how long the
servers took to start.

``--server-args "--enable-torch-compile --torch-compile-max-bs 1" --server-env TORCHINDUCTOR_ENABLE_PDL=1`` measures
both with torch.compile.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import decode_log
import requests
import typer
from decode_log import steady
from machine import describe
from shapes import SHAPES, config_of
from step_profile import profile_steps
from subjects import BASELINE, MODES, Mode, Subject, asking, prompt, subject

from oscar_tools.local_server import LocalServer, serve

TOKENS = 256


def dense(config: dict[str, Any]) -> bool:
    """Whether all layers read all weights and attend to everything, which the bounds below are for."""
    others = ("num_experts", "num_local_experts", "n_routed_experts", "layer_types", "text_config", "sliding_window")
    return not any(config.get(key) for key in others)


def weight_bytes(config: dict[str, Any]) -> int:
    """Bytes of BF16 weights that a decode step reads: all but the embedding."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = hidden * head * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"]
    return 2 * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


def kv_bytes(config: dict[str, Any], length: int, bits: float) -> float:
    """Bytes of the cached keys and values of one request."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * length * bits / 8


def generate(server: LocalServer, ids: list[int], tokens: int) -> None:
    """Have ``tokens`` tokens generated.

    Raises:
        requests.HTTPError: the server refused.
    """
    requests.post(f"{server.url}/generate", json=asking(ids, tokens), timeout=600).raise_for_status()


def ms_per_token(server: LocalServer, length: int) -> float:
    """Decode time per token at a context of ``length`` tokens."""
    before = len(server.text())
    generate(server, prompt(length, length), TOKENS)
    return steady(server.text()[before:]).ms_per_step


def measure(
    mode: Mode, what: Subject, server_args: list[str], extra: dict[str, str], log: Path, sizes: list[int], steps: int
) -> dict[str, Any]:
    """Start a server in one mode and time it.

    Args:
        mode: the cache.
        what: the model.
        server_args, extra: further flags and environment.
        log: of the server.
        sizes: context lengths.
        steps: layers of the model, to profile where a step goes; 0 for not.
    """
    begin = time.monotonic()
    env = mode.environment(what.folder) | extra
    with serve(what.folder, log, [*what.flags, *decode_log.FLAGS, *server_args, *mode.args], env) as server:
        result: dict[str, Any] = {"start_s": round(time.monotonic() - begin, 1), "server": mode.facts(server)}
        result["ms"] = {length: ms_per_token(server, length) for length in sizes}
        print(result["ms"], flush=True)
        if steps:
            longest = prompt(max(sizes), max(sizes))
            result["step"] = profile_steps(server, partial(generate, server, longest, 2 * TOKENS), steps)
            print(json.dumps(result["step"]), flush=True)
    return result


def row(config: dict[str, Any], measured: dict[str, dict[str, Any]], length: int, bandwidth: float) -> dict[str, Any]:
    """Times of all modes at one context length and, of a dense model, what they are of their byte bounds;
    ``bandwidth`` in TB/s."""
    out: dict[str, Any] = {"length": length}
    for name, result in measured.items():
        taken = result["ms"][length]
        out |= {f"{name}_ms": round(taken, 3)}
        if dense(config):
            read = weight_bytes(config) + kv_bytes(config, length, result["server"]["bits"])
            bound = 1e3 * read / (bandwidth * 1e12)
            out |= {f"{name}_of_bound": round(taken / bound, 2)}
    if len(measured) == 2:
        out["speedup"] = round(out["bf16_ms"] / out["int2_ms"], 2)
    return out


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    lengths: Annotated[str, typer.Option(help="context lengths, separated by commas")] = "30000,60000,100000",
    bandwidth: Annotated[float, typer.Option(help="read bandwidth of the card in TB/s")] = 4.6,
    modes: Annotated[str, typer.Option(help="bf16, int2 or both, separated by commas")] = "bf16,int2",
    server_args: Annotated[str, typer.Option(help="further flags for both servers")] = "",
    server_env: Annotated[str, typer.Option(help="NAME=VALUE for both servers, separated by spaces")] = "",
    steps: Annotated[bool, typer.Option(help="profile where a step goes at the longest length")] = True,
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/decode.json"),
) -> None:
    """Measure decode latency of one request end to end."""
    config = config_of(shape)
    sizes = [int(part) for part in lengths.split(",")]
    extra = dict(pair.split("=", 1) for pair in server_env.split())
    out.parent.mkdir(parents=True, exist_ok=True)
    layers = config["num_hidden_layers"] if steps else 0
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        what = subject(None, shape, Path(folder))
        for name in modes.split(","):
            log = out.with_suffix(f".{name}.log")
            measured[name] = measure(MODES[name], what, server_args.split(), extra, log, sizes, layers)
    result = describe() | {"shape": shape, "bandwidth_tb_s": bandwidth, "baseline": BASELINE}
    result["rows"] = [row(config, measured, length, bandwidth) for length in sizes]
    for line in result["rows"]:
        print(line)
    result["servers"] = {name: part["server"] for name, part in measured.items()}
    result["start_s"] = {name: part["start_s"] for name, part in measured.items()}
    for name, part in measured.items():
        result |= {f"{name}_step": part["step"]} if "step" in part else {}
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
