"""The paper's tables from finished runs: method, bits per element, benchmarks, mean, drop; and paired tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from sglang_oscar.evaluation.benchmarks import BENCHMARKS
from sglang_oscar.evaluation.runner import scores_of
from sglang_oscar.evaluation.significance import mean_and_std, paired_test

Row = tuple[str, str, float | None, Path]
"""Method name in folders, title, bits per element, folder of its runs."""


def collect(rows: Sequence[Row], benchmarks: Sequence[str], reference: str | None = "bf16") -> dict[str, Any]:
    """Results as JSON values.

    Args:
        rows: what to show, in order.
        benchmarks: columns, in order.
        reference: name of the row that others are compared with.

    Returns:
        ``benchmarks``, and ``rows``: one dict per row with ``method``, ``title``, ``bits``, ``scores`` (benchmark ->
        ``mean``, ``std``, ``runs``), ``mean`` over benchmarks (None unless all are there), ``drop`` against the
        reference's mean, and ``paired`` (benchmark -> test against the reference).
    """
    runs = {name: scores_of(folder, benchmarks, name) for name, _, _, folder in rows}
    out: list[dict[str, Any]] = []
    for name, title, bits, _ in rows:
        scores = {}
        for benchmark, results in runs[name].items():
            mean, std = mean_and_std([result["score"] for result in results])
            scores[benchmark] = {"mean": mean, "std": std, "runs": len(results)}
        means = [mean_and_std([result["score"] for result in results])[0] for results in runs[name].values()]
        overall = sum(means) / len(means) if len(means) == len(benchmarks) else None
        out.append({"method": name, "title": title, "bits": bits, "scores": scores, "mean": overall})
    base = next((row for row in out if row["method"] == reference), None)
    for row in out:
        if base is None or row is base:
            continue
        both = row["mean"] is not None and base["mean"] is not None
        row["drop"] = row["mean"] - base["mean"] if both else None
        row["paired"] = {}
        for benchmark in row["scores"].keys() & base["scores"].keys():
            first, second = (
                [result["scores"] for result in runs[name][benchmark]] for name in (base["method"], row["method"])
            )
            row["paired"][benchmark] = paired_test(first, second).to_json()
    return {"benchmarks": list(benchmarks), "reference": reference if base else None, "rows": out}


def markdown(results: dict[str, Any], title: str) -> str:
    """The results as a Markdown table in the paper's form, followed by the paired tests."""
    names = results["benchmarks"]
    heads = [BENCHMARKS[name].title for name in names]
    lines = [f"# {title}", "", "| " + " | ".join(["Method", "BPE", *heads, "Mean", "Drop"]) + " |"]
    lines.append("|" + "---|" * (len(heads) + 4))
    for row in results["rows"]:
        cells = [_score(row["scores"].get(name)) for name in names]
        bits = "" if row["bits"] is None else f"{row['bits']:.2f}"
        mean = "" if row["mean"] is None else f"{row['mean']:.2f}"
        drop = "" if row.get("drop") is None else f"{row['drop']:+.2f}"
        lines.append("| " + " | ".join([row["title"], bits, *cells, mean, drop]) + " |")
    lines += ["", "Mean ± standard deviation over seeds. BPE: bits per KV element at 128K tokens, windows included."]
    tests = [(row, name) for row in results["rows"] for name in names if name in row.get("paired", {})]
    if tests:
        reference = next(row["title"] for row in results["rows"] if row["method"] == results["reference"])
        lines += ["", f"Paired differences from {reference}, question by question:", ""]
        lines += ["| Method | Benchmark | Questions | Difference | 95% interval | p |", "|---|---|---|---|---|---|"]
        for row, name in tests:
            test = row["paired"][name]
            interval = "" if test["low"] is None else f"{100 * test['low']:+.2f} to {100 * test['high']:+.2f}"
            cells = [row["title"], BENCHMARKS[name].title, str(test["questions"]), f"{100 * test['difference']:+.2f}"]
            lines.append("| " + " | ".join([*cells, interval, f"{test['p_value']:.3g}"]) + " |")
    return "\n".join(lines) + "\n"


def write_tables(folder: Path, stem: str, results: dict[str, Any], title: str) -> tuple[Path, Path]:
    """Write ``<stem>.json`` and ``<stem>.md``; returns their paths.

    Raises:
        OSError: if they cannot be written.
    """
    texts = {".json": json.dumps(results, indent=1) + "\n", ".md": markdown(results, title)}
    paths = []
    for suffix, text in texts.items():
        path = folder / f"{stem}{suffix}"
        write_text_atomically(path, text)
        paths.append(path)
    return paths[0], paths[1]


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    return f"{score['mean']:.2f}" if score["std"] is None else f"{score['mean']:.2f} ± {score['std']:.2f}"
