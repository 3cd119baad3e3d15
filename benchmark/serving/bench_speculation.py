"""What a step of verification costs in SGLang and what it brings, with BF16, FP8 and int2 caches, random weights.

For every cache, a server without speculation and one with drafts, of which SGLang accepts as many as it is told
(``SGLANG_SIMULATE_ACC_LEN``). Drafts come from NGRAM, which takes the host and no GPU, or from a layer of EAGLE3 or a
hybrid's own draft layer (NEXTN), with random weights, whose time and cache are those of a trained one. Prompts are sent
once before they are measured, so that they come from the prefix cache. Prints milliseconds per step and tokens per
second, as SGLang's log counts them.

Runs with one ``--lock FILE`` share a GPU, see ``one_gpu.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from one_gpu import Questions, measure, parse_loads
from shapes import SHAPES, config_of, write_draft_model
from subjects import MODES, chain, eagle3, subject

WAYS = ("plain", "speculation")


def speculation(algorithm: str, folder: Path, drafts: int, accepted: float) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that verifies chains of ``drafts`` tokens and keeps ``accepted`` on average."""
    own = {
        "NGRAM": ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(drafts),
                  "--speculative-ngram-max-bfs-breadth", "1"],
        "EAGLE3": eagle3(folder, drafts),
        "NEXTN": ["--speculative-algorithm", "NEXTN", *chain(drafts)],
    }  # fmt: skip
    return own[algorithm], {"SGLANG_SIMULATE_ACC_LEN": str(accepted), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    loads: Annotated[str, typer.Option(help="requests x tokens of a prompt, with commas")] = "1x100000,8x100000",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2",
    ways: Annotated[str, typer.Option(help=f"of {', '.join(WAYS)}, with commas")] = ",".join(WAYS),
    algorithm: Annotated[str, typer.Option(help="NGRAM, EAGLE3 or NEXTN")] = "NGRAM",
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
    layers = config_of(shape)["num_hidden_layers"] if steps else 0
    questions = Questions(parse_loads(loads), tokens, lock)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as draft:
        what = subject(None, shape, Path(folder))
        if algorithm == "EAGLE3":
            write_draft_model(Path(draft), shape)
        drafting = speculation(algorithm, Path(draft), drafts, accepted)
        for name in modes.split(","):
            for way in ways.split(","):
                flags, env = drafting if way == "speculation" else ([], {})
                log = out.with_suffix(f".{name}.{way}.log")
                flags = [*server_args.split(), *flags]
                result[f"{name}_{way}"] = measure(MODES[name], what, flags, env, log, questions, layers)
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
