"""Print INT2 retrieval of a model folder: python scripts/reference_model/int2_table.py models/reference"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "kernels")]

from reference_model import evaluate  # noqa: E402
from reference_model.export import build_model, load_state, load_tokenizer  # noqa: E402
from reference_model.outliers import choose_pair, scale_pair  # noqa: E402
from reference_model.simulate import BF16, baselines, fitted, second_moments  # noqa: E402


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="1024,2048", help="document lengths in tokens")
    parser.add_argument("--groups", default="64,128")
    parser.add_argument("--regimes", default=",".join(evaluate.REGIMES))
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--questions", type=int, default=4, help="per document, of 8 facts")
    parser.add_argument("--factors", default="1", help="key outliers to add to what the model has")
    parser.add_argument("--pairs", help="rotary pairs for the outliers, one per layer (default: chosen)")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="append a line of JSON per figure here")
    return parser.parse_args()


def main() -> None:
    """Evaluate every recipe, length, group and regime."""
    args = parse_args()
    config, trained = load_state(args.model)
    tokenizer = load_tokenizer(args.model)
    model = build_model(config, trained, args.device)
    ids = evaluate.calibration_prompts(tokenizer).to(args.device)
    plain = second_moments(model, ids)
    for factor in map(float, args.factors.split(",")):
        state, pairs = trained, []
        if factor != 1:
            chosen = [choose_pair(q, k, factor) for q, k in zip(plain["q"], plain["k"], strict=True)]
            pairs = list(map(int, args.pairs.split(","))) if args.pairs else chosen
            for layer, pair in enumerate(pairs):
                state = scale_pair(state, layer, pair, factor)
        model.load_state_dict(state)
        moments = second_moments(model, ids)
        print(f"factor {factor:g}, pairs {pairs}", flush=True)
        for length in map(int, args.lengths.split(",")):
            batch = max(1, args.batch_tokens // length)
            built = evaluate.prompts_and_answers(tokenizer, length, args.documents, args.questions, 8, seed=2)
            prompts, answers, document = built
            for group in map(int, args.groups.split(",")):
                recipes = [*baselines(group, config.head_dim, config.layers, ids.device), *fitted(moments, group)]
                for recipe in [BF16, *recipes]:
                    row = {}
                    for regime in args.regimes.split(","):
                        prefix = evaluate.prefix_length(regime, prompts.shape[1], document)
                        row[regime] = evaluate.retrieval(model, recipe, prompts, answers, prefix, batch)
                    line = "  ".join(f"{regime} {value:.2f}" for regime, value in row.items())
                    print(f"{length:5d} g{group:<3d} {recipe.name:18s} {line}", flush=True)
                    if args.json:
                        key = {"factor": factor, "length": length, "group": group, "recipe": recipe.name}
                        with args.json.open("a") as file:
                            file.write(json.dumps(key | row) + "\n")


if __name__ == "__main__":
    main()
