"""Train a draft head (EAGLE3, one layer) for a reference model, on text like the model's own.

    python scripts/train_draft_head.py --model models/reference --out models/draft --seconds 300
    python scripts/train_draft_head.py --model models/reference --out /tmp/draft --seconds 300 --lengths 512 \
        --batch-tokens 2048 --corpus-mb 8  # on a CPU: it learns, and not much

Writes a folder that SGLang serves with ``--speculative-algorithm EAGLE3 --speculative-draft-model-path``, and prints
tokens per step of verification on held-out documents, of the head before and after training. The target must be a
Qwen3ForCausalLM that train_reference_model.py has written. The loss is the cross-entropy to the target's distribution
over chains that go on from the head's own output, as served ones do; it needs no further term that keeps that output
close to what the target hands over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from draft_head.acceptance import tokens_per_step  # noqa: E402
from draft_head.head import load_head  # noqa: E402
from draft_head.prompts import held_out_prompts  # noqa: E402
from draft_head.target import Target  # noqa: E402
from draft_head.training import Plan, prepare, texts, train  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402


def main(
    model: Annotated[Path, typer.Option(help="folder of the target")],
    out: Annotated[Path, typer.Option(help="folder for the head")],
    seconds: Annotated[float, typer.Option(help="train so long", min=1)] = Plan.seconds,
    updates: Annotated[int | None, typer.Option(help="so many updates instead, always alike", min=1)] = None,
    lengths: Annotated[str, typer.Option(help="tokens of a text, in turn")] = ",".join(map(str, Plan.lengths)),
    batch_tokens: Annotated[int, typer.Option(help="tokens of an update")] = Plan.batch_tokens,
    steps: Annotated[int, typer.Option(help="drafts of a chain", min=1)] = Plan.steps,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = Plan.lr,
    retrieval: Annotated[float, typer.Option(help="share of texts with facts and questions")] = Plan.retrieval,
    corpus_mb: Annotated[float, typer.Option(help="source text to read")] = 60,
    workers: Annotated[int, typer.Option(help="processes that build texts")] = Plan.workers,
    work: Annotated[Path | None, typer.Option(help="folder for tokens, reused if filled (default: OUT/work)")] = None,
    documents: Annotated[int, typer.Option(help="held-out documents of every length")] = 8,
    held_out: Annotated[str, typer.Option(help="tokens of held-out documents, with commas")] = "600,1500",
    tokens: Annotated[int, typer.Option(help="tokens of an answer to them")] = 64,
    seed: Annotated[int, typer.Option(help="of weights and texts")] = Plan.seed,
) -> None:
    """Prepare, train, save, measure."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = tuple(int(length) for length in lengths.split(","))
    plan = Plan(seconds, updates, sizes, batch_tokens, steps, lr, retrieval, workers, seed)
    tokenizer = load_tokenizer(model)
    folder = work or out / "work"
    words = prepare(folder, tokenizer, corpus_mb, seed)
    target = Target(model, device)
    torch.manual_seed(seed)
    head = target.new_head()
    report = train(head, target, texts(plan, folder, tokenizer, words), plan)
    head.save(out)
    prompts = held_out_prompts(tokenizer, [int(length) for length in held_out.split(",")], documents)
    torch.manual_seed(seed)
    # As it is served, rounded to BF16.
    heads = [target.new_head().eval(), load_head(out, target.config).to(device)]
    before, after = tokens_per_step(heads, target, prompts, tokens, steps)
    report |= {"seed": seed, "steps": steps, "tokens_per_step": {k: round(v, 3) for k, v in after.items()}}
    report["untrained"] = {kind: round(value, 3) for kind, value in before.items()}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    typer.run(main)
