"""The paper's tables from finished runs: method, bits per element, benchmarks, mean, drop; and paired tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_tools.evaluation.answers import Answers
from oscar_tools.evaluation.benchmarks import BENCHMARKS
from oscar_tools.evaluation.runner import scores_of
from oscar_tools.evaluation.significance import mean_and_std, paired_test

Row = tuple[str, str, Path]
"""Method name in folders, title of an INT2 server of it, folder of its runs."""


def collect(rows: Sequence[Row], benchmarks: Sequence[str], reference: str | None = "bf16") -> dict[str, Any]:
    """Results as JSON values.

    Args:
        rows: what to show, in order.
        benchmarks: columns, in order.
        reference: name of the row that others are compared with.

    Returns:
        ``benchmarks``, and ``rows``: one dict per row with ``method``, ``title``, ``bits`` and ``server``, as the
        server says, ``scores`` (benchmark -> ``mean``, ``std``, ``runs`` and, over all runs, ``asked``, ``answered``,
        ``cut_off``, and ``warning``, None where that is as it should be), ``mean`` over benchmarks (None unless all
        are there and answered), ``drop`` against the reference's mean, and ``paired`` (benchmark -> test against the
        reference).

    Raises:
        HarnessError: a run of a release that did not count answers.
    """
    runs = {name: scores_of(folder, benchmarks, name) for name, _, folder in rows}
    out: list[dict[str, Any]] = []
    for name, title, _ in rows:
        scores: dict[str, dict[str, Any]] = {}
        for benchmark, results in runs[name].items():
            mean, std = mean_and_std([result["score"] for result in results])
            answers = sum((Answers(**result["answers"]) for result in results), Answers(0, 0, 0))
            scores[benchmark] = {"mean": mean, "std": std, "runs": len(results)} | answers.to_json()
            scores[benchmark]["warning"] = answers.warning
        counted = [score["mean"] for score in scores.values() if score["answered"]]
        overall = sum(counted) / len(counted) if len(counted) == len(benchmarks) else None
        server: dict[str, Any] = next((result["server"] for of in runs[name].values() for result in of), {})
        # A title says how an INT2 server was made; of any other, what it is.
        shown = title if server.get("int2") else server.get("title", title)
        row = {"method": name, "title": shown, "bits": server.get("bits"), "server": server}
        out.append(row | {"scores": scores, "mean": overall})
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
    lines += [
        "",
        "Mean ± standard deviation over seeds. BPE: bits per KV element at 128K tokens, windows included, as the "
        "server says.",
        "",
        "| Method | Benchmark | Asked | Answered | Cut off |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        for name, score in row["scores"].items():
            counts = (str(score[key]) for key in ("asked", "answered", "cut_off"))
            lines.append("| " + " | ".join([row["title"], BENCHMARKS[name].title, *counts]) + " |")
    lines += [line for warning in warnings(results) for line in ("", f"Warning: {warning}.")]
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


def warnings(results: dict[str, Any], only_empty: bool = False) -> list[str]:
    """What readers of the scores must know, a line each.

    Args:
        results: of :func:`collect`.
        only_empty: of scores only behind which there is no answer at all.
    """
    return [
        f"{row['title']}, {BENCHMARKS[name].title}: {score['warning']}"
        for row in results["rows"]
        for name, score in row["scores"].items()
        if score["warning"] and not (only_empty and score["answered"])
    ]


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
    if not score["answered"]:
        return "no answer"
    return f"{score['mean']:.2f}" if score["std"] is None else f"{score['mean']:.2f} ± {score['std']:.2f}"
