"""Whether a 2-bit cache of the model costs drafts: tokens per step of verification with a trained draft head.

    python scripts/train_draft_head.py --model models/reference --out models/draft
    python benchmark/serving/bench_acceptance.py --model models/reference --draft models/draft \
        --k-rotation rotations/{mode}_k.safetensors --v-rotation rotations/{mode}_v.safetensors

One server per cache, all with the same head, whose own cache is in 16 bits. Documents are longer than the 16-bit
windows and computed before they are asked about, so what the model makes of a question, and hands to the head, comes
from the cache, as do the facts. Answers are greedy. Everything is compared over the same prompts: tokens per step, as
SGLang counts them, with bootstrap intervals over documents, and the difference to the first of the modes.

The mode ``exact`` is int2 mode's cache with 16 bits a side, for the difference that its arithmetic alone makes.
"""

from __future__ import annotations

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import requests
import typer
from machine import describe
from rich.console import Console
from rich.table import Table
from subjects import MODES, asking, eagle3

from oscar_cpu.server import environment, has_gpu
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_tools.evaluation.intervals import RESAMPLES
from oscar_tools.local_server import LocalServer, serve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from draft_head.prompts import KINDS, Prompt, held_out_prompts  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402

HADAMARD, IDENTITY = "hadamard", "identity"
"""Recipes that need no file."""
WHOLE = "all"
"""Prompts of every kind and length."""


class Answer(NamedTuple):
    """What came back: tokens, steps of verification they took, and whether a question was answered rightly."""

    tokens: int
    steps: int
    right: bool | None


def rotation_of(name: str, given: str) -> str:
    """A rotation option for a mode; ``{mode}`` in it stands for the mode's name."""
    return given.replace("{mode}", name)


def cache_settings(name: str, k_rotation: str, v_rotation: str) -> dict[str, str]:
    """Variables of a server with a cache. Bits are told where a recipe is named; a rotation file says its own."""
    mode = MODES[name]
    if mode.stock or name == "exact":
        return dict(mode.env)
    env = {}
    for side, given in (("K", k_rotation), ("V", v_rotation)):
        rotation = rotation_of(name, given)
        env[f"SGLANG_OSCAR_{side}_ROTATION_PATH"] = rotation
        if rotation in (HADAMARD, IDENTITY) and mode.fit is not None:
            goal = BitGoal.parse(mode.fit)
            env[f"SGLANG_OSCAR_{side}_BITS"] = str(goal.key if side == "K" else goal.value)
    return env


def send(server: LocalServer, prompt: Prompt, tokens: int) -> Answer:
    """Ask a prompt for exactly ``tokens`` tokens.

    Raises:
        requests.HTTPError: the server refused it.
        RuntimeError: the answer does not say how many steps it took; the server does not speculate.
    """
    reply = requests.post(f"{server.url}/generate", json=asking(prompt.ids, tokens), timeout=1800)
    reply.raise_for_status()
    found = reply.json()
    meta = found["meta_info"]
    if tokens > 1 and not meta.get("spec_verify_ct"):
        raise RuntimeError(f"no steps of verification in an answer; see {server.log}")
    right = found["output_ids"][: len(prompt.answer)] == prompt.answer if prompt.answer else None
    return Answer(meta["completion_tokens"], meta.get("spec_verify_ct") or 0, right)


def ask_all(server: LocalServer, prompts: list[Prompt], tokens: int, workers: int) -> list[Answer]:
    """Answers to all prompts; documents first, so that every question finds its document in the cache."""
    documents = [prompt for prompt in prompts if prompt.kind == "continuation"]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda prompt: send(server, prompt, 1), documents))
        return list(pool.map(lambda prompt: send(server, prompt, tokens), prompts))


def interval(statistic: np.ndarray) -> list[float]:
    """The middle 95% of resampled statistics."""
    return [round(float(x), 4) for x in np.percentile(statistic, [2.5, 97.5])]


def sums(prompts: list[Prompt], answers: list[Answer], part: str) -> np.ndarray:
    """Tokens and steps of every document in a part (a kind, a length, or all): float64 [documents, 2]."""
    by_document: dict[int, list[int]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        if part in (WHOLE, prompt.kind, str(prompt.length)):
            total = by_document.setdefault(prompt.document, [0, 0])
            total[0] += answer.tokens
            total[1] += answer.steps
    return np.array([by_document[number] for number in sorted(by_document)], dtype=np.float64)


def resampled(totals: np.ndarray) -> np.ndarray:
    """Tokens per step of documents drawn with replacement, the same draw for every mode: float64 [resamples]."""
    drawn = np.random.default_rng(0).integers(0, len(totals), (RESAMPLES, len(totals)))
    tokens, steps = totals[drawn].sum(1).T
    return tokens / steps


def summary(prompts: list[Prompt], answers: list[Answer], reference: list[Answer] | None) -> dict[str, Any]:
    """By kind, by length and over all: tokens per step with its interval, and the difference to a reference."""
    found: dict[str, Any] = {}
    for part in (WHOLE, *KINDS, *dict.fromkeys(str(prompt.length) for prompt in prompts)):
        totals = sums(prompts, answers, part)
        if not len(totals):
            continue
        ratio = totals[:, 0].sum() / totals[:, 1].sum()
        row = {"tokens_per_step": round(float(ratio), 4), "interval": interval(resampled(totals))}
        if reference is not None:
            other = sums(prompts, reference, part)
            row["difference"] = round(float(ratio - other[:, 0].sum() / other[:, 1].sum()), 4)
            row["difference_interval"] = interval(resampled(totals) - resampled(other))
        found[part] = row
    scored = [answer.right for answer in answers if answer.right is not None]
    found["right_answers"] = round(sum(scored) / len(scored), 4) if scored else None
    found["questions"] = len(scored)
    return found


def show(result: dict[str, Any]) -> None:
    """A table: modes and parts, tokens per step, differences, right answers."""
    table = Table("cache", "prompts", "tokens per step", "95%", "difference", "95%", "right")
    for name, found in result.items():
        for part, row in found.items():
            if isinstance(row, dict) and "interval" in row:
                more = [str(row.get(key, "")) for key in ("difference", "difference_interval")]
                right = str(found["right_answers"]) if part == WHOLE else ""
                table.add_row(name, part, str(row["tokens_per_step"]), str(row["interval"]), *more, right)
    Console(width=120).print(table)


def check(modes: list[str], k_rotation: str, v_rotation: str) -> None:
    """Refuse what would measure something else than it says.

    Raises:
        typer.BadParameter: an unknown mode, a stock cache on a CPU, or one rotation file for caches of different bits.
    """
    if unknown := [name for name in modes if name not in MODES]:
        raise typer.BadParameter(f"no {unknown[0]}; there are {', '.join(MODES)}", param_hint="--modes")
    if not has_gpu() and (stock := [name for name in modes if MODES[name].stock]):
        text = f"stock SGLang does not run draft models on a CPU: {stock[0]} needs a GPU; take exact instead"
        raise typer.BadParameter(text, param_hint="--modes")
    low = [name for name in modes if not MODES[name].stock and name != "exact"]
    for side in (k_rotation, v_rotation):
        if len(low) > 1 and side not in (HADAMARD, IDENTITY) and "{mode}" not in side:
            text = "a rotation file is for one number of bits: put {mode} in its name, or ask for one mode with it"
            raise typer.BadParameter(text, param_hint="--k-rotation and --v-rotation")


def main(
    model: Annotated[Path, typer.Option(help="folder of the model")],
    draft: Annotated[Path, typer.Option(help="folder of its draft head")],
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2,k2v2",
    k_rotation: Annotated[str, typer.Option(help="file or recipe for keys; {mode} is the mode's name")] = HADAMARD,
    v_rotation: Annotated[str, typer.Option(help="file or recipe for values; {mode} is the mode's name")] = HADAMARD,
    group: Annotated[int, typer.Option(help="quantization group size")] = 128,
    documents: Annotated[int, typer.Option(help="documents of every length", min=1)] = 32,
    lengths: Annotated[str, typer.Option(help="tokens of a document, with commas")] = "600,1500,3000",
    questions: Annotated[int, typer.Option(help="about every document", min=1, max=4)] = 2,
    tokens: Annotated[int, typer.Option(help="tokens of an answer", min=16)] = 64,
    steps: Annotated[int, typer.Option(help="drafts of a step", min=1)] = 3,
    workers: Annotated[int, typer.Option(help="prompts at once", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="of the documents")] = 7,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/acceptance.json"),
) -> None:
    """Measure how many drafts every cache accepts."""
    names = modes.split(",")
    check(names, k_rotation, v_rotation)
    sizes = [int(length) for length in lengths.split(",")]
    prompts = held_out_prompts(load_tokenizer(model), sizes, documents, questions, seed)
    flags = ["--mem-fraction-static", "0.5" if has_gpu() else "0.2", *eagle3(draft, steps + 1)]
    result: dict[str, Any] = describe() | {
        "model": model.name,
        "documents": documents,
        "lengths": sizes,
        "tokens": tokens,
        "steps": steps,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    answers: dict[str, list[Answer]] = {}
    caches: dict[str, Any] = {}
    for name in names:
        low = [] if MODES[name].stock else ["--kv-cache-quant-group-size", str(group)]
        args = [*flags, *MODES[name].args, *low, *shlex.split(server_args)]
        env = environment() | cache_settings(name, k_rotation, v_rotation)
        with serve(model, out.with_suffix(f".{name}.log"), args, env) as server:
            said = MODES[name].facts(server)
            answers[name] = ask_all(server, prompts, tokens, workers)
        reference = None if name == names[0] else answers[names[0]]
        caches[name] = {"server": said} | summary(prompts, answers[name], reference)
        out.write_text(json.dumps(result | {"caches": caches}, indent=2) + "\n")
        print(name, caches[name][WHOLE], "right:", caches[name]["right_answers"], flush=True)
    show(caches)


if __name__ == "__main__":
    typer.run(main)
