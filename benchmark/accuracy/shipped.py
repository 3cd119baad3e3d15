"""What the text that calibration ships is worth, by kind of text: KL over that of calibration on the kind itself.

    python benchmark/accuracy/shipped.py --model results/real_model --out results/shipped.json

Both are 20,000 tokens, and of documents that are not measured on (:mod:`accuracy.corpus`): what the shipped mix takes
from the standard library is of the part ``train`` here, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy.calibration import Calibration, calibrate  # noqa: E402
from accuracy.corpus import KINDS, part_of  # noqa: E402
from accuracy.host_memory import LayerActivations, ParkedLayers  # noqa: E402
from accuracy.material import RealMaterial  # noqa: E402
from accuracy.measures.language import Language  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.models import load  # noqa: E402
from oscar_rotation.threads import one_thread  # noqa: E402
from oscar_tools.calibration import local_text, shipped_text  # noqa: E402
from oscar_tools.calibration.dump_driver import LONGEST_PROMPT  # noqa: E402
from oscar_tools.calibration.self_calibration import TOKENS  # noqa: E402

LENGTH = 1000
"""Tokens of a sequence of calibration on one kind."""


def shipped_prompts(tokenizer: Any, tokens: int) -> list[list[int]]:
    """The shipped mix, of training documents."""
    sources = {name: text for name, text in local_text.python_sources().items() if part_of(name) == "train"}
    topics = [(name, text) for name, text in local_text.reference_topics() if part_of(name) == "train"]
    with (
        mock.patch.object(local_text, "python_sources", return_value=sources),
        mock.patch.object(local_text, "reference_topics", return_value=topics),
    ):
        return shipped_text.prompts(tokenizer, tokens, LONGEST_PROMPT)


def joined(model: Any, prompts: list[list[int]]) -> Calibration:
    """Activations of prompts of any lengths."""
    parts = [calibrate(model, torch.tensor([prompt])) for prompt in prompts]
    layers = (
        LayerActivations(*(torch.cat([getattr(x, name) for x in layer]) for name in ("q", "k", "v")))
        for layer in zip(*(part.layers for part in parts), strict=True)
    )
    first = parts[0]
    parked = ParkedLayers(layers, model.device)
    return Calibration(parked, [len(prompt) for prompt in prompts], first.readers, first.rotary, first.context)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "reference"), help="folder or id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--split", choices=["choice", "report"], default="report", help="text that is measured on")
    parser.add_argument("--contexts", type=int, default=12, help="of each kind")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context")
    parser.add_argument("--tail", type=int, default=256, help="tokens that are decoded")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of calibration")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only these kinds; repeatable")
    parser.add_argument("--known", type=Path, help="an earlier result: kinds' own calibration is not measured again")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "shipped.json", help="result")
    args = parser.parse_args()
    model, tokenizer = load(args.model, args.device)
    material = RealMaterial(tokenizer, args.split)
    group = min(128, model.config.get_text_config().head_dim)
    name = f"focus g{group}, served form, --bits k3v2"

    def kls(calibration: Calibration, kinds: list[str]) -> dict[str, float]:
        method = all_methods()[name]
        with one_thread():
            method.fit(calibration)
        return {kind: language[kind].measure(method)["kl"]["mean"] for kind in kinds}

    kinds = args.kind or list(KINDS)
    language = {
        kind: Language(model, material.text(kind, args.contexts, args.length), args.tail, batch=4) for kind in kinds
    }
    with torch.no_grad():
        shipped = kls(joined(model, shipped_prompts(tokenizer, args.tokens)), kinds)
        print("shipped", shipped, flush=True)
        own = json.loads(args.known.read_text())["own"] if args.known else {}
        for kind in kinds:
            if kind not in own:
                rows = material._windows(kind, args.tokens // LENGTH, LENGTH)
                own[kind] = kls(calibrate(model, rows), [kind])[kind]
            print(kind, f"{own[kind]:.5f}", f"{shipped[kind] / own[kind] - 1:+.1%}", flush=True)
    found = {"model": Path(args.model).name, "method": name, "contexts": args.contexts, "length": args.length,
             "split": args.split, "tokens": args.tokens, "shipped": shipped, "own": own}  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
