"""What a step of verification costs in SGLang and what it brings, with BF16, FP8 and int2 caches, random weights.

For every cache, a server without speculation and one with drafts, of which SGLang accepts as many as it is told
(``SGLANG_SIMULATE_ACC_LEN``). Drafts come from NGRAM, which takes the host and no GPU, or from a layer of EAGLE3 with
random weights, whose time and cache are those of a trained one. Prompts are sent once before they are measured, so that
they come from the prefix cache. Prints milliseconds per step and tokens per second, as SGLang's log counts them.

Runs with one ``--lock FILE`` share a GPU: their servers start and compute prompts beside each other, and one at a time
is measured. Hold the lock with flock(1) until all are ready.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import decode_log
import typer
from bench_throughput import ask, speed_of
from machine import describe
from step_profile import profile_steps
from subjects import MODES, SERVER, SHAPES, Mode, write_draft_model, write_model

from sglang_oscar.cpu.server import environment
from sglang_oscar.local_server import serve

WAYS = ("plain", "speculation")


def speculation(algorithm: str, folder: Path, drafts: int, accepted: float) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that verifies chains of ``drafts`` tokens and keeps ``accepted`` on average."""
    own = {
        "NGRAM": ["--speculative-ngram-max-bfs-breadth", "1"],
        "EAGLE3": ["--speculative-draft-model-path", str(folder), "--speculative-num-steps", str(drafts - 1),
                   "--speculative-eagle-topk", "1"],
    }  # fmt: skip
    flags = ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", str(drafts), *own[algorithm]]
    return flags, {"SGLANG_SIMULATE_ACC_LEN": str(accepted), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """While inside, nobody else holds the lock; None is no lock."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(
    mode: Mode,
    flags: list[str],
    env: dict[str, str],
    folder: str,
    log: Path,
    loads: list[tuple[int, int]],
    tokens: int,
    lock: Path | None,
    layers: int,
) -> list[dict[str, Any]]:
    """One row for every load, of requests at once and tokens of a prompt; with ``layers``, of the model, also where a
    step goes.

    Raises:
        RuntimeError: the server refused requests.
    """
    rows = []
    with serve(folder, log, [*SERVER, *decode_log.FLAGS, *mode.args, *flags], environment() | mode.env | env) as server:
        # Shorter loads ask for the first of the same prompts.
        ask(server, [max(length for _, length in loads)] * max(count for count, _ in loads), 1)
        for count, length in loads:
            with alone(lock):
                speed = speed_of(server, [length] * count, tokens)
                asking = partial(ask, server, [length] * count, tokens)
                steps = {"step": profile_steps(server, asking, layers)} if layers else {}
            rows.append({"requests": count, "length": length} | {k: round(v, 3) for k, v in speed._asdict().items()})
            rows[-1] |= steps
            print(log.name, rows[-1], flush=True)
    return rows


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    loads: Annotated[str, typer.Option(help="requests x tokens of a prompt, with commas")] = "1x100000,8x100000",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2",
    ways: Annotated[str, typer.Option(help=f"of {', '.join(WAYS)}, with commas")] = ",".join(WAYS),
    algorithm: Annotated[str, typer.Option(help="NGRAM or EAGLE3")] = "NGRAM",
    drafts: Annotated[int, typer.Option(help="tokens that a step verifies")] = 4,
    accepted: Annotated[float, typer.Option(help="tokens that a step keeps, on average")] = 2.5,
    tokens: Annotated[int, typer.Option(help="tokens that a request generates")] = 512,
    steps: Annotated[bool, typer.Option(help="profile where a step goes")] = False,
    lock: Annotated[Path | None, typer.Option(help="file that is locked while speed is measured")] = None,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/speculation.json"),
) -> None:
    """Measure what speculation brings to long requests."""
    result: dict[str, Any] = describe() | {
        "shape": shape,
        "algorithm": algorithm,
        "drafts": drafts,
        "accepted": accepted,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    layers = SHAPES[shape]["num_hidden_layers"] if steps else 0
    pairs = [(int(count), int(length)) for count, length in (load.split("x") for load in loads.split(","))]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as draft:
        write_model(Path(folder), shape)
        write_draft_model(Path(draft), shape)
        drafting = speculation(algorithm, Path(draft), drafts, accepted)
        for name in modes.split(","):
            for way in ways.split(","):
                flags, env = drafting if way == "speculation" else ([], {})
                log = out.with_suffix(f".{name}.{way}.log")
                flags = [*server_args.split(), *flags]
                result[f"{name}_{way}"] = measure(MODES[name], flags, env, folder, log, pairs, tokens, lock, layers)
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
