"""What sink logits, sliding windows and heads of 64 channels have to do with what two bits lose.

    python benchmark/accuracy/sink_study.py --model results/gpt_oss --model models/reference --out results/sinks.json

For every model and method: KL of the next token as a server caches it; without the first and last tokens in 16 bits;
and with layers of a sliding window quantized as well. By layer: the part of attention that sinks take, and the KL of
attention with them and, of the same queries and keys, without them. A model that has sinks is measured once more with
sinks that take about half of the attention, in 16 bits and two alike.
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

from accuracy import scope  # noqa: E402
from accuracy.attention import prefill_then_decode  # noqa: E402
from accuracy.calibration import Calibration, calibrate  # noqa: E402
from accuracy.layer_kinds import all_layers_cached  # noqa: E402
from accuracy.material import ShippedMaterial  # noqa: E402
from accuracy.measures.language import Language  # noqa: E402
from accuracy.measures.layers import attention_kl  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import Method  # noqa: E402
from accuracy.models import load  # noqa: E402
from accuracy.reach import Reach  # noqa: E402
from accuracy.session import Session  # noqa: E402
from oscar_rotation.atomic import write_text_atomically  # noqa: E402
from oscar_tools.evaluation.intervals import bootstrap  # noqa: E402

METHODS = ("naive INT2 g128", "QuaRot-INT2 g64", "OSCAR g64", "OSCAR g32", "plus g64", "focus g64, served form")
SERVED, BARE, ALL = "as served", "no 16-bit tokens", "no 16-bit tokens, windows too"
TAIL = 256
"""Tokens of a context that are decoded."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, action="append", required=True, help="of scripts/train_reference_model.py"
    )
    parser.add_argument("--method", action="append", choices=[*all_methods()], help="instead of the usual; repeatable")
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sinks.json")
    return parser.parse_args(argv)


def fitted(name: str, calibration: Calibration, bare: bool) -> Method:
    """A method, with its own tokens in 16 bits or none."""
    method = all_methods()[name]
    if bare:
        method.sink = method.recent = 0
    method.fit(calibration)
    return method


def by_layer(session: Session, method: Method) -> list[dict[str, Any]]:
    """Of every layer with a quantized cache: the part of sinks, and KL with sinks and without, with intervals."""
    view, found = method.view(session.schedule), []
    assert view.key_exact_from is not None
    for number, (x, module) in enumerate(session.activations()):
        n, m = x.k.shape[2], x.q.shape[2]
        at, positions = torch.arange(n - m, n), torch.arange(n)
        coded = (positions >= view.sink) & (positions < view.key_exact_from[at][:, None])
        group = x.q.shape[1] // x.k.shape[1]
        exact, read = (y.repeat_interleave(group, 1).mT for y in (x.k, method.keys(number, x.k)))
        true, seen = (x.q * module.scaling @ y for y in (exact, read))
        seen = torch.where(coded, seen, true)
        true, seen = (y.masked_fill(positions > at[:, None], float("-inf")) for y in (true, seen))
        row = {"without": vars(bootstrap(attention_kl(true, seen).numpy()))}
        reach = Reach.of(module)
        if reach.sinks is not None:
            true, seen = (reach.with_sinks(y) for y in (true, seen))
            row["with"] = vars(bootstrap(attention_kl(true, seen).numpy()))
            row["part"] = true.softmax(-1)[..., -1].mean((0, 2)).tolist()
        found.append(row)
    return found


def strengthen(session: Session) -> None:
    """Give every head of layers with a quantized cache a sink that takes about half of its attention."""
    for x, module in session.activations():
        n, m = x.k.shape[2], x.q.shape[2]
        logits = x.q * module.scaling @ x.k.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1).mT
        future = torch.arange(n) > torch.arange(n - m, n)[:, None]
        module.sinks.copy_(logits.masked_fill(future, float("-inf")).logsumexp(-1).mean((0, 2)))


def study(label: str, model: Any, material: ShippedMaterial, args: argparse.Namespace, strong: bool) -> dict[str, Any]:
    """All settings of one model; without windows, and with strong sinks, that of a server alone."""
    ids = material.text("source", args.contexts, args.context)
    schedule = prefill_then_decode(args.context, args.context - TAIL)
    if strong:
        strengthen(Session(model, ids[: scope.LAYER_CONTEXTS], schedule))
    session = Session(model, ids[: scope.LAYER_CONTEXTS], schedule)
    language = Language(model, ids, TAIL, scope.LAYER_CONTEXTS)
    out: dict[str, Any] = {"head_dim": model.config.head_dim, "kl": {}, "layers": {}}
    settings = (SERVED,) if strong or all_layers_cached(model) else (SERVED, BARE, ALL)
    for setting in settings:
        model.windows_too = setting == ALL
        calibration = calibrate(model, material.calibration("retrieval"))
        for name in args.method or METHODS:
            method = fitted(name, calibration, setting != SERVED)
            row = language.measure(method)
            out["kl"].setdefault(name, {})[setting] = row["kl"]
            if setting == SERVED:
                out["bf16"] = row["nll"]["mean"] - row["excess"]["mean"]
                out["layers"][name] = by_layer(session, method)
            print(f"{label}, {name}, {setting}: KL {row['kl']['mean']:.5f}", flush=True)
    return out


def main(argv: list[str] | None = None) -> None:
    """Measure and save."""
    args = parse_args(argv)
    torch.set_grad_enabled(False)
    results: dict[str, Any] = {
        "device": "CPU",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "command": shlex.join(["python", "benchmark/accuracy/sink_study.py", *(argv or sys.argv[1:])]),
        "models": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    for folder in args.model:
        model, tokenizer = load(folder, "cpu")
        material = ShippedMaterial(tokenizer, "report")
        for strong in (False, True) if any(name.endswith("sinks") for name in model.state_dict()) else (False,):
            label = folder.name + (", strong sinks" if strong else "")
            results["models"][label] = study(label, model, material, args, strong)
            write_text_atomically(args.out, json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
