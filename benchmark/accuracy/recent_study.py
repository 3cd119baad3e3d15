"""How much the recent window is worth: KL of the next token with fewer recent tokens in 16 bits, of every kind of text.

    python benchmark/accuracy/recent_study.py --model results/real_model --out results/recent.json

The last tokens of every context are decoded, as an answer is: many short requests are where windows take the memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy.calibration import calibrate  # noqa: E402
from accuracy.material import RealMaterial  # noqa: E402
from accuracy.measures.language import Language  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.models import load  # noqa: E402
from oscar_rotation.atomic import write_text_atomically  # noqa: E402

METHOD = "focus g128, served form, --bits k3v2"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a real model (scripts/real_model.sh)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", choices=[*all_methods()], default=METHOD)
    parser.add_argument("--recent", type=int, nargs="+", default=[512, 256, 128, 64, 32, 0])
    parser.add_argument("--contexts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--context", type=int, default=1536, help="tokens")
    parser.add_argument("--tail", type=int, default=768, help="of them that are decoded")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "recent.json")
    return parser.parse_args(argv)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    args = parse_args()
    model, tokenizer = load(str(args.model), args.device)
    material = RealMaterial(tokenizer, "report")
    method = all_methods()[args.method]
    method.fit(calibrate(model, material.calibration("broad")))
    result: dict[str, Any] = {
        "benchmark": "recent tokens", "command": shlex.join(["python", *sys.argv]), "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"), "device": args.device, "model": args.model.name,
        "method": args.method, "sink": method.sink, "contexts": args.contexts, "context": args.context,
        "decoded": args.tail, "kl": {},
    }  # fmt: skip
    for kind in material.kinds:
        language = Language(model, material.text(kind, args.contexts, args.context), args.tail, batch=2)
        for recent in args.recent:
            method.recent = recent
            kl = language.measure(method)["kl"]
            result["kl"].setdefault(kind, {})[str(recent)] = kl
            print(kind, recent, *(f"{name}={kl[name]:.5f}" for name in ("mean", "low", "high")), flush=True)
            write_text_atomically(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
