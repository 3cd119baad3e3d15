"""Does a 2-bit cache cost accepted drafts? One model and one draft head, BF16 and int2 caches, the same questions.

    python scripts/train_draft_head.py --model models/reference --out results/draft_head
    python benchmark/serving/bench_acceptance.py --draft results/draft_head --k-rotation FILE --v-rotation FILE

Every server is asked to recall numbers from documents and to go on with held-out text, greedily; SGLang counts the
steps of verification. Tokens per step are compared prompt by prompt with those behind the BF16 cache. Behind another
cache the model says other things now and then, which may be easier or harder to draft, so the interval of the
difference counts. On a CPU stock SGLang has no drafts: ``--modes exact,int2`` then compares with 16-bit rows.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from rich.console import Console
from rich.table import Table
from subjects import BASELINE, Mode
from tokenizers import Tokenizer

from sglang_oscar.cpu.server import environment
from sglang_oscar.evaluation.intervals import bootstrap, wilson
from sglang_oscar.local_server import LocalServer, serve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from reference_model.retrieval import DIGITS, build_document, filler_lines, question  # noqa: E402

FACTS = 4
INT2 = ["--kv-cache-dtype", "int2"]
BITS = {"int2": ("2", "2"), "k3v2": ("3", "2"), "k4v2": ("4", "2"), "exact": ("16", "16")}
MODES = {"bf16": Mode(["--attention-backend", BASELINE], {}, 16.0)} | {
    name: Mode(INT2, {"SGLANG_OSCAR_K_BITS": k, "SGLANG_OSCAR_V_BITS": v}, 0.0) for name, (k, v) in BITS.items()
}


def prompts(tokenizer: Tokenizer, lengths: list[int], count: int) -> list[tuple[list[int], str]]:
    """Token ids and the right answer, none for text that is only to be gone on with: ``count`` of either kind and
    length."""
    made, lines = [], filler_lines()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    for length in lengths:
        for number in range(count):
            document = build_document(lambda text: len(encode(text)), length, FACTS, 7000 + 100 * length + number)
            word = next(iter(document.facts))
            made.append((encode(document.text + question(word)), document.facts[word]))
            begin = random.Random(length + number).randrange(len(lines) - length)
            made.append((encode("".join(lines[begin : begin + length]))[:length], ""))
    return made


def ask(server: LocalServer, asked: list[tuple[list[int], str]], tokens: int, workers: int) -> list[dict[str, Any]]:
    """What every prompt is answered with: tokens, steps of verification, and the text."""

    def one(ids: list[int]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        reply = requests.post(
            f"{server.url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=1800
        )
        reply.raise_for_status()
        answer = reply.json()
        meta = answer["meta_info"]
        return {"tokens": meta["completion_tokens"], "steps": meta["spec_verify_ct"], "text": answer["text"]}

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, [ids for ids, _ in asked]))


def row(
    asked: list[tuple[list[int], str]], answers: list[dict[str, Any]], base: list[float] | None
) -> tuple[dict[str, Any], list[float]]:
    """Tokens per step, their difference to another cache's, and right answers, with intervals; and the former by
    prompt."""
    per_step = [answer["tokens"] / answer["steps"] for answer in answers]
    told = [answer["text"].startswith(right) for (_, right), answer in zip(asked, answers, strict=True) if right]
    assert all(len(right) == DIGITS for _, right in asked if right)
    found: dict[str, Any] = {
        "tokens_a_step": bootstrap(per_step).to_json(),
        "right": wilson(sum(told), len(told)).to_json(),
    }
    if base is not None:
        found["difference"] = bootstrap([x - y for x, y in zip(per_step, base, strict=True)]).to_json()
    return found, per_step


def main(
    draft: Annotated[Path, typer.Option(help="folder of a draft head")],
    model: Annotated[Path, typer.Option(help="folder of the model")] = ROOT / "models" / "reference",
    k_rotation: Annotated[str, typer.Option(help="rotation file or recipe of the keys")] = "hadamard",
    v_rotation: Annotated[str, typer.Option(help="rotation file or recipe of the values")] = "hadamard",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas; the first is compared with")] = (
        "bf16,int2,k3v2"
    ),
    lengths: Annotated[str, typer.Option(help="tokens of a prompt, with commas")] = "600,1500,3000",
    count: Annotated[int, typer.Option(help="prompts of either kind and every length", min=2)] = 32,
    tokens: Annotated[int, typer.Option(help="tokens of an answer")] = 96,
    drafts: Annotated[int, typer.Option(help="tokens that a step drafts")] = 3,
    group: Annotated[int, typer.Option(help="channels that share a scale")] = 64,
    workers: Annotated[int, typer.Option(help="requests at once")] = 16,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/acceptance.json"),
) -> None:
    """Measure accepted drafts behind every cache."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked = prompts(tokenizer, [int(length) for length in lengths.split(",")], count)
    result: dict[str, Any] = describe() | {"model": model.name, "prompts": len(asked), "drafts": drafts, "rows": {}}
    if (report := draft / "training.json").is_file():
        result["head"] = json.loads(report.read_text())
    flags = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(draft)]
    flags += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
    flags += ["--speculative-num-draft-tokens", str(drafts + 1), "--mem-fraction-static", "0.3", *server_args.split()]
    rotations = {"SGLANG_OSCAR_K_ROTATION_PATH": k_rotation, "SGLANG_OSCAR_V_ROTATION_PATH": v_rotation}
    out.parent.mkdir(parents=True, exist_ok=True)
    base: list[float] | None = None
    for name in modes.split(","):
        own = list(MODES[name].args)
        if name != "bf16":
            own += ["--kv-cache-quant-group-size", str(group)]
        env = environment() | (rotations | MODES[name].env if name != "bf16" else {})
        with serve(model, out.with_suffix(f".{name}.log"), [*flags, *own], env) as server:
            answers = ask(server, asked, tokens, workers)
        result["rows"][name], per_step = row(asked, answers, base)
        base = base or per_step
        out.write_text(json.dumps(result, indent=2) + "\n")
        print(name, json.dumps(result["rows"][name]), flush=True)
    show(result["rows"])


def show(rows: dict[str, dict[str, Any]]) -> None:
    """A table of all caches."""
    table = Table("cache", "tokens a step", "difference", "right")
    for name, found in rows.items():
        cells = [found.get(part) for part in ("tokens_a_step", "difference", "right")]
        table.add_row(name, *(f"{x['mean']:.3f} ({x['low']:.3f} to {x['high']:.3f})" if x else "" for x in cells))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
