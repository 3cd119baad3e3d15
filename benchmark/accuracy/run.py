"""The accuracy laboratory: measure every method on every model and regime, and write the report.

    python benchmark/accuracy/run.py                                  # the shipped model, on the GPU where there is one
    python benchmark/accuracy/run.py --model models/reference --model DIR --size full
    python benchmark/accuracy/run.py --size reduced                   # for two CPU cores
    python benchmark/accuracy/run.py --model results/real_model       # a real model, made by scripts/real_model.sh
    python benchmark/accuracy/run.py --size long --only plus --only "OSCAR g" --model DIR  # few methods, much text
    python benchmark/accuracy/run.py --model NAME=DIR --methods real --calibrate broad --part 1/2  # half of a named set
    python benchmark/accuracy/run.py --server-only --out server.json  # real servers of the shipped model, over HTTP
    python benchmark/accuracy/run.py --from a.json --from b.json      # the report again, of several runs

Writes RESULTS (JSON), benchmark/results/accuracy.md and figures beside it. Plots need the extra ``plots``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy import scope  # noqa: E402
from accuracy.bench import Bench  # noqa: E402
from accuracy.earlier_runs import merged, resumed  # noqa: E402
from accuracy.layer_kinds import all_layers_cached  # noqa: E402
from accuracy.material import Material, RealMaterial, ShippedMaterial  # noqa: E402
from accuracy.measures.outliers import common_direction, outlier_statistics  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import Method  # noqa: E402
from accuracy.models import REGIMES, Regime, apply_regime, is_shipped, load  # noqa: E402
from oscar_rotation.atomic import write_text_atomically  # noqa: E402

MODEL = ROOT / "models" / "reference"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", help="folder or id, or NAME=FOLDER (default: models/reference); repeatable"
    )
    parser.add_argument("--size", choices=[*scope.SIZES], help="default: full on a GPU, reduced on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", action="append", help="methods whose name contains this, and BF16; repeatable")
    parser.add_argument("--table", action="append", help="tables of methods instead of the size's; repeatable")
    parser.add_argument(
        "--methods", action="append", choices=[*scope.SETS], help="a named set of methods instead of tables; repeatable"
    )
    parser.add_argument("--part", type=part, default=(1, 1), help="I/N: every N-th of the methods, from the I-th on")
    parser.add_argument(
        "--length", action="append", type=int, help="documents of retrieval, in tokens, instead of the size's"
    )
    parser.add_argument(
        "--calibrate", choices=RealMaterial.domains, help="text that all methods of a real model are calibrated on"
    )
    parser.add_argument("--text", action="append", type=Path, default=[], help="more of it: JSON Lines; repeatable")
    parser.add_argument("--regime", action="append", help="regimes instead of the size's; repeatable")
    parser.add_argument("--split", choices=[*scope.SPLITS], default="report", help="documents and text to measure on")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "accuracy.json", help="results")
    parser.add_argument(
        "--from", dest="sources", action="append", type=Path, help="report on these results; repeatable"
    )
    parser.add_argument("--merge", type=Path, help="with --from: write them as one file")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out holds, measure the others")
    parser.add_argument("--no-server", action="store_true", help="start no servers")
    parser.add_argument("--server-only", action="store_true", help="nothing but servers")
    parser.add_argument("--report", type=Path, default=ROOT / "benchmark" / "results" / "accuracy.md")
    parser.add_argument("--measure-only", action="store_true", help="no report")
    return parser.parse_args(argv)


def part(text: str) -> tuple[int, int]:
    """I/N of the command line.

    Raises:
        argparse.ArgumentTypeError: it is no such thing.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text!r}")
    return int(found[1]), int(found[2])


def measure_model(
    source: str,
    size: scope.Size,
    args: argparse.Namespace,
    save: Callable[[dict[str, Any]], None],
    known: dict[str, Any],
) -> list[str]:
    """All regimes and methods on one model; ``save`` is given what there is after every row.

    Regimes are of the shipped models whose layers are all cached alike; any other is measured as it is, one that was
    not trained here on four kinds of text. Rows of ``known``, what an earlier run saved, are kept.

    Returns:
        names of methods that failed.

    Raises:
        SystemExit: text of a real model for a shipped one.
    """
    shipped = is_shipped(source)
    if shipped and (args.calibrate or args.text):
        raise SystemExit(f"error: {source} is calibrated on its own text; leave out --calibrate and --text")
    model, tokenizer = load(source, args.device)
    material: Material = (
        ShippedMaterial(tokenizer, args.split) if shipped else RealMaterial(tokenizer, args.split, args.text)
    )
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()} if shipped else {}
    out: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "split": args.split}
    out["regimes"] = dict(known.get("regimes", {}))  # Of regimes behind the one that is measured, too.
    out |= {"calibration": args.calibrate} if args.calibrate else {}
    failed: list[str] = []
    regimes = [r for r in REGIMES if r.name in size.regimes] if shipped and all_layers_cached(model) else [REGIMES[0]]
    for regime in regimes:
        begin, before = time.time(), known.get("regimes", {}).get(regime.name, {})
        methods = chosen_methods(regime, size, args, not shipped, set(before.get("rows", {})))
        if before and not methods:
            continue
        if shipped:
            apply_regime(model, trained, material.calibration("retrieval"), regime)
        bench = Bench(model, material, size, args.calibrate)
        calibration = bench.calibration(args.calibrate or "retrieval")
        found: dict[str, Any] = {
            "factors": {"keys": regime.keys, "values": regime.values},
            "outliers": outlier_statistics(calibration),
            "outlier_alignment": common_direction(calibration),
            "rows": dict(before.get("rows", {})),
            "seconds": before.get("seconds", 0.0),
        }
        out["regimes"][regime.name] = found
        print(f"{source}, {regime.name}: ready after {time.time() - begin:.0f} s", flush=True)
        for name, row in rows(bench, methods):
            if row is None:
                failed.append(name)
                continue
            found["rows"][name] = row
            found["seconds"] = round(before.get("seconds", 0) + time.time() - begin, 1)
            save(out)
        print(f"{source}, {regime.name}: {time.time() - begin:.0f} s", flush=True)
    return failed


def chosen_methods(
    regime: Regime, size: scope.Size, args: argparse.Namespace, real: bool, done: set[str]
) -> list[Method]:
    """Methods that are wanted in a regime and not done: of named sets in their order, else those of a real model table
    by table."""
    known = all_methods()
    if args.methods:
        chosen = [known[name] for name in dict.fromkeys(name for of in args.methods for name in scope.SETS[of])]
    else:
        chosen = [method for method in known.values() if scope.wanted(method, regime.name, size, real)]
        if real:
            chosen.sort(key=lambda method: size.real_tables.index(method.table))
    if args.only:
        chosen = [x for x in chosen if x.name == "BF16" or any(part in x.name for part in args.only)]
    begin, step = args.part
    return [method for method in chosen[begin - 1 :: step] if method.name not in done]


def rows(bench: Bench, methods: list[Method]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Names and rows of methods, as they come; None for one that failed, which does not stop the others."""
    for method in methods:
        begin = time.time()
        try:
            row = bench.row(method)
        except Exception:
            traceback.print_exc()
            yield method.name, None
            continue
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
    """Every model of the command line; the results are written to ``args.out`` as they come.

    Raises:
        SystemExit: rows of ``args.out`` that this run would not measure so, or methods that failed.
    """
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
        results["models"] = resumed(args.out, size_name, args.split, args.calibrate)

    def write() -> None:
        results["seconds"] = round(time.time() - begin)
        if args.device.startswith("cuda"):
            results["gpu_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
        write_text_atomically(args.out, json.dumps(results) + "\n")

    def save(name: str, found: dict[str, Any]) -> None:
        results["models"][name] = found
        write()

    size = scope.SIZES[size_name]
    tables = {"tables": tuple(args.table), "real_tables": tuple(args.table)} if args.table else {}
    lengths = tuple(args.length or size.lengths)
    size = replace(size, regimes=tuple(args.regime or size.regimes), lengths=lengths, **tables)
    failed: list[str] = []
    for given in [] if args.server_only else args.model or [str(MODEL)]:
        name, source = given.split("=", 1) if "=" in given else (Path(given).name, given)
        failed += measure_model(source, size, args, partial(save, name), results["models"].get(name, {}))
    if not args.no_server:
        from accuracy.server import measure_server

        results["server"] = measure_server(MODEL)
    write()
    if failed:
        raise SystemExit(f"error: {len(failed)} methods failed, the others are in {args.out}: {', '.join(failed)}")
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure, save, report."""
    args = parse_args(argv)
    if args.sources:
        results = merged([json.loads(path.read_text(encoding="utf-8")) for path in args.sources])
        if args.merge:
            write_text_atomically(args.merge, json.dumps(results) + "\n")
            print(f"wrote {args.merge}")
    else:
        size_name = args.size or ("full" if args.device.startswith("cuda") else "reduced")
        results = merged([measure(args, size_name)])
        memory = f", {results['gpu_gib']} GiB of GPU memory at most" if "gpu_gib" in results else ""
        print(f"wrote {args.out} after {results['seconds']} s{memory}", flush=True)
    if not args.measure_only:
        from accuracy.report import write_report

        write_report(results, args.report)
        print(f"wrote {args.report}")


if __name__ == "__main__":
    main()
