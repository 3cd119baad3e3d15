"""The accuracy laboratory: measure every method on every model and regime, and write the report.

    python benchmark/accuracy/run.py                                  # the shipped model, on the GPU where there is one
    python benchmark/accuracy/run.py --model models/reference --model DIR --size full
    python benchmark/accuracy/run.py --size reduced                   # for two CPU cores
    python benchmark/accuracy/run.py --model results/real_model       # a real model, made by scripts/real_model.sh
    python benchmark/accuracy/run.py --size long --only plus --only "OSCAR g" --model DIR  # few methods, much text
    python benchmark/accuracy/run.py --server-only --out server.json  # real servers of the shipped model, over HTTP
    python benchmark/accuracy/run.py --from a.json --from b.json      # the report again, of several runs

Writes RESULTS (JSON), benchmark/results/accuracy.md and figures beside it. Plots need the extra ``plots``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy import plan  # noqa: E402
from accuracy.attention import all_layers_attend, prefill_then_decode  # noqa: E402
from accuracy.calibration import Calibration, calibrate  # noqa: E402
from accuracy.earlier_runs import merged, resumed  # noqa: E402
from accuracy.material import Material, RealMaterial, ShippedMaterial  # noqa: E402
from accuracy.measures.language import Language  # noqa: E402
from accuracy.measures.layers import Layers  # noqa: E402
from accuracy.measures.outliers import common_direction, outlier_statistics  # noqa: E402
from accuracy.measures.retrieval import Retrieval  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import Method  # noqa: E402
from accuracy.models import REGIMES, Regime, apply_regime, is_shipped, load  # noqa: E402
from accuracy.session import Session  # noqa: E402
from oscar_rotation.threads import one_thread  # noqa: E402

MODEL = ROOT / "models" / "reference"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="model folder or id (default: models/reference); repeatable")
    parser.add_argument("--size", choices=[*plan.SIZES], help="default: full on a GPU, reduced on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", help="methods whose name contains this, and BF16; repeatable")
    parser.add_argument("--table", action="append", help="tables of methods instead of the size's; repeatable")
    parser.add_argument("--regime", action="append", help="regimes instead of the size's; repeatable")
    parser.add_argument("--split", choices=[*plan.SPLITS], default="report", help="documents and text to measure on")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "accuracy.json", help="results")
    parser.add_argument(
        "--from", dest="sources", action="append", type=Path, help="report on these results; repeatable"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out holds, measure the others")
    parser.add_argument("--no-server", action="store_true", help="start no servers")
    parser.add_argument("--server-only", action="store_true", help="nothing but servers")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmark" / "results" / "accuracy.md")
    parser.add_argument("--measure-only", action="store_true", help="no report")
    return parser.parse_args(argv)


class Bench:
    """One model in one regime.

    Args:
        model: in that regime.
        material: what it is calibrated on and asked.
        size: how much to measure.
    """

    def __init__(self, model: Any, material: Material, size: plan.Size) -> None:
        self.model, self.material = model, material
        self.calibrations: dict[str, Calibration] = {}
        batch = max(1, size.batch_tokens // size.context)
        first, *others = material.kinds
        ids = material.text(first, size.contexts, size.context)
        self.language = Language(model, ids, size.tail, batch)
        self.kinds = {
            kind: Language(
                model, material.text(kind, size.kind_contexts, size.kind_context), size.kind_tail, batch, hidden=False
            )
            for kind in others
        }
        self.layers = Layers(one_batch(model, ids[: plan.LAYER_CONTEXTS], size.tail))
        self.long = {
            n: Layers(one_batch(model, material.text(first, plan.LONG_CONTEXTS, n), 64)) for n in size.long_contexts
        }
        self.retrieval = {
            length: Retrieval(
                model,
                material.questions(length, size.documents, size.questions),
                max(1, size.batch_tokens // length),
            )
            for length in size.lengths
        }

    def calibration(self, domain: str) -> Calibration:
        """Activations of calibration text of a domain."""
        if domain not in self.calibrations:
            self.calibrations[domain] = calibrate(self.model, self.material.calibration(domain))
        return self.calibrations[domain]

    @torch.no_grad()
    def row(self, method: Method) -> dict[str, Any]:
        """Fit a method and measure everything."""
        calibration = self.calibration(getattr(method, "domain", "retrieval"))
        begin = time.time()
        # Many small factorizations: threads that wait for each other cost more than they save.
        with one_thread():
            method.fit(calibration)
        row: dict[str, Any] = {
            "table": method.table,
            "source": method.source,
            "fit_seconds": round(time.time() - begin, 1),
            "bits": {str(n): method.bits_per_element(calibration.head_dim, n) for n in (2048, 32768, 131072)},
            "language": self.language.measure(method),
            "retrieval": {
                str(n): task.measure(method)
                for index, (n, task) in enumerate(self.retrieval.items())
                if index == 0 or method.table in plan.EVERY_LENGTH
            },
        }
        if self.kinds:
            row["kinds"] = {kind: language.measure(method) for kind, language in self.kinds.items()}
        if method.table in plan.EVERYWHERE or method.name in plan.FIGURES:
            row["layers"] = self.layers.measure(method)
        if method.name in plan.FIGURES:
            row["kl_by_length"] = {
                str(n): vars_of(layers.measure(method), "attention_kl") for n, layers in self.long.items()
            }
        return row


def one_batch(model: Any, ids: torch.Tensor, tail: int) -> Session:
    """Contexts whose last ``tail`` tokens are decoded."""
    return Session(model, ids, prefill_then_decode(ids.shape[1], ids.shape[1] - tail))


def vars_of(measured: dict[str, Any], name: str) -> dict[str, float]:
    """The interval of one measurement."""
    return measured["intervals"][name]


def measure_model(
    source: str,
    size: plan.Size,
    split: str,
    device: str,
    only: list[str],
    save: Callable[[dict[str, Any]], None],
    known: dict[str, Any],
) -> dict[str, Any]:
    """All regimes and methods on one model; ``save`` is given what there is after every row.

    Regimes are of the shipped models whose layers all attend; any other is measured as it is, one that was not trained
    here on four kinds of text. Rows of ``known``, what an earlier run saved, are kept and not measured again.
    """
    model, tokenizer = load(source, device)
    shipped = is_shipped(source)
    material: Material = (ShippedMaterial if shipped else RealMaterial)(tokenizer, split)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()} if shipped else {}
    out: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "regimes": {}, "split": split}
    regimes = [r for r in REGIMES if r.name in size.regimes] if shipped and all_layers_attend(model) else [REGIMES[0]]
    for regime in regimes:
        begin = time.time()
        if shipped:
            apply_regime(model, trained, material.calibration("retrieval"), regime)
        bench = Bench(model, material, size)
        calibration = bench.calibration("retrieval")
        found: dict[str, Any] = {
            "factors": {"keys": regime.keys, "values": regime.values},
            "outliers": outlier_statistics(calibration),
            "outlier_alignment": common_direction(calibration),
            "rows": known.get("regimes", {}).get(regime.name, {}).get("rows", {}),
        }
        out["regimes"][regime.name] = found
        print(f"{source}, {regime.name}: ready after {time.time() - begin:.0f} s", flush=True)
        left = chosen_methods(regime, size, only, not shipped, set(found["rows"]))
        for name, row in rows(bench, left):
            found["rows"][name] = row
            found["seconds"] = round(time.time() - begin, 1)
            save(out)
        print(f"{source}, {regime.name}: {time.time() - begin:.0f} s", flush=True)
    return out


def chosen_methods(regime: Regime, size: plan.Size, only: list[str], real: bool, done: set[str]) -> list[Method]:
    """Methods that are wanted in a regime and not done, those of a real model table by table."""
    chosen = [
        method
        for name, method in all_methods().items()
        if plan.wanted(method, regime.name, size, real)
        and (not only or name == "BF16" or any(x in name for x in only))
        and name not in done
    ]
    return sorted(chosen, key=lambda method: size.real_tables.index(method.table)) if real else chosen


def rows(bench: Bench, methods: list[Method]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and rows of methods, as they come."""
    for method in methods:
        begin = time.time()
        row = bench.row(method)
        recalled = " ".join(f"{x['accuracy']['mean']:.2f}" for x in row["retrieval"].values())
        language = row["language"]
        line = f"ppl {language['perplexity']['mean']:9.3f}  kl {language['kl']['mean']:8.5f}"
        line += "".join(f" {x['kl']['mean']:.5f}" for x in row.get("kinds", {}).values())
        seconds = f"{time.time() - begin:5.1f} s ({row['fit_seconds']:.1f} s to fit)"
        print(
            f"{method.name:44s} {row['bits']['131072']:6.3f} bits  {line}  retrieval {recalled}  {seconds}", flush=True
        )
        yield method.name, row


def measure(args: argparse.Namespace, size_name: str) -> dict[str, Any]:
    """Every model of the command line; the results are written to ``args.out`` as they come."""
    torch.set_grad_enabled(False)
    begin = time.time()
    results: dict[str, Any] = {
        "size": size_name,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "command": shlex.join(["python", "benchmark/accuracy/run.py", *sys.argv[1:]]),
        "models": {},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.resume and args.out.is_file():
        results["models"] = resumed(args.out, size_name, args.split)

    def save(name: str, found: dict[str, Any]) -> None:
        results["models"][name] = found
        results["seconds"] = round(time.time() - begin)
        args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")

    size = plan.SIZES[size_name]
    tables = {"tables": tuple(args.table), "real_tables": tuple(args.table)} if args.table else {}
    size = replace(size, regimes=tuple(args.regime or size.regimes), **tables)
    sources = [] if args.server_only else args.model or [str(MODEL)]
    for source in sources:
        keep = partial(save, Path(source).name)
        known = results["models"].get(Path(source).name, {})
        measure_model(source, size, args.split, args.device, args.only or [], keep, known)
    if not args.no_server:
        from accuracy.server import measure_server

        results["server"] = measure_server(MODEL)
    results["seconds"] = round(time.time() - begin)
    args.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure, save, report."""
    args = parse_args(argv)
    if args.sources:
        results = merged([json.loads(path.read_text(encoding="utf-8")) for path in args.sources])
    else:
        size_name = args.size or ("full" if args.device.startswith("cuda") else "reduced")
        results = merged([measure(args, size_name)])
        print(f"wrote {args.out} after {results['seconds']} s", flush=True)
    if not args.measure_only:
        from accuracy.report import write_report

        write_report(results, args.report)
        print(f"wrote {args.report}")


if __name__ == "__main__":
    main()
