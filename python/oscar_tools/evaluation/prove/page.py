"""The page of a run: a verdict table, then a section per measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from oscar_tools.evaluation.prove.measures.tail_kl import ALL
from oscar_tools.evaluation.prove.notes import NOTES, READING
from oscar_tools.evaluation.prove.rates import cut_share

Row = dict[str, Any]
NONE = "-"


def number(x: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent where it is readable."""
    if x == 0 or abs(x) >= 1e-4:
        return f"{x:.{digits}g}" if abs(x) < 1000 else f"{x:,.0f}"
    return f"{x:.1e}"


def interval(found: dict[str, Any] | None, sign: bool = False) -> str:
    """A figure with its interval; of all alike the figure alone."""
    if not found:
        return NONE
    mean = found["mean"] if "mean" in found else found["difference"]
    shown = f"{'+' if sign and mean > 0 else ''}{number(mean)}"
    low, high = found["low"], found["high"]
    return shown if low is None else f"{shown} ({number(low, 2)} to {number(high, 2)})"


def rate(found: dict[str, Any] | None) -> str:
    """A proportion with its interval."""
    return NONE if not found else f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _share(found: dict[str, Any] | None) -> str:
    """A proportion near 1 with its interval."""
    return NONE if not found else f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def paired(found: dict[str, Any] | None) -> str:
    """A proportion with its interval, and the p-value beside BF16."""
    if not found:
        return NONE
    p = p_value(found)
    return rate(found["right"]) + ("" if p == NONE else f", p {p}")


def share_cut(found: dict[str, int]) -> str:
    """The share of answers that reached their limit of tokens."""
    return f"{cut_share(found):.1%}"


def p_value(found: dict[str, Any] | None) -> str:
    """The p-value of a paired test against BF16."""
    if not found or found.get("p_value") is None:
        return NONE
    return f"{found['p_value']:.2g}" if found["p_value"] >= 1e-3 else "< .001"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page(results: dict[str, Any], plots: dict[str, str]) -> str:
    """Markdown.

    Args:
        results: as :func:`report.collect` makes them.
        plots: measure -> file name of its plot, relative to the page.
    """
    caches = results["caches"]
    parts = [f"# {results['model']}: what the KV cache costs\n", _setting(results), "## Verdict\n", verdict(caches)]
    parts.append(READING)
    if results["remarks"]:
        parts.append("**Left out or cut short**\n\n" + "\n".join(f"* {text}" for text in results["remarks"]) + "\n")
    for name, title in results["measures"].items():
        rows = [row for row in caches if row["figures"].get(name)]
        if rows:
            parts += [f"## {title}\n", NOTES[name] + "\n", *SECTIONS[name](rows)]
            if name in plots:
                parts.append(f"![{title}]({plots[name]})\n")
    parts += ["## Servers\n", _servers(caches)]
    return "\n".join(parts)


def _setting(results: dict[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items() if name != "device")
    lengths = ", ".join(f"{n:,}" for n in results["lengths"])
    return (
        f"{results['machine']['device']}; {machine}. Contexts of {lengths} tokens. Text: {results['text']}.\n\n"
        f"    {results['command']}\n"
    )


def verdict(caches: Sequence[Row]) -> str:
    """One line per cache, with what decides."""
    caches = [row for row in caches if not row.get("chunk")]
    heads = ("cache", "bits", "mean KL", "p99", "p99.9", "top-1 agreement", "excess", "retrieval", "session", "JSON")
    cold = ["cached from cold, KL"] if any("effects" in row["figures"] for row in caches) else []
    recalled = {length: None for row in caches for length in row["figures"].get("recall", {}).get("lengths", ())}
    buried = {name: None for row in caches for name in row["figures"].get("tasks", {}).get("files", ())}
    more = (*cold, *(f"recall, {length}" for length in recalled), *(f"buried {name}" for name in buried))
    return table((*heads, *more), [_verdict_row(row, cold, list(recalled), list(buried)) for row in caches])


def _verdict_row(row: Row, cold: Sequence[str], recalled: Sequence[str], buried: Sequence[str]) -> list[str]:
    figures = row["figures"]
    tail = figures.get("tail-kl", {}).get(ALL, {})
    kl = tail.get("kl", {})
    retrieval = figures.get("retrieval", {}).get("all", {})
    return [
        row["title"],
        NONE if row["bits"] is None else f"{row['bits']:.2f}",
        interval(kl.get("mean")),
        interval(kl.get("p99")),
        interval(kl.get("p99.9")),
        _share(tail.get("agreement")),
        interval(tail.get("excess"), sign=True),
        rate(retrieval.get("right")),
        rate(figures.get("session", {}).get("right")),
        rate(figures.get("json", {}).get("all", {}).get("right")),
        *(interval(figures.get("effects", {}).get(ALL, {}).get("kl")) for _ in cold),
        *(paired(figures.get("recall", {}).get("lengths", {}).get(length)) for length in recalled),
        *(paired(figures.get("tasks", {}).get("files", {}).get(name)) for name in buried),
    ]


def _tail(rows: Sequence[Row]) -> Iterator[str]:
    heads = ("cache", "context", "mean KL", "p99", "p99.9", "top-1 agreement", "nats", "excess", "p", "told")
    lines = []
    for row in rows:
        for length, x in _lengths(row["figures"]["tail-kl"]):
            kl = [interval(x["kl"][name]) for name in ("mean", "p99", "p99.9")]
            excess = x.get("excess")
            lines.append(
                [row["title"], length, *kl, _share(x["agreement"]), f"{x['nats']:.4f}",
                 interval(excess, sign=True), p_value(excess), f"{x['covered']:.3f}"]
            )  # fmt: skip
    yield table(heads, lines)
    first = next(iter(rows))["figures"]["tail-kl"][ALL]
    yield f"{first['documents']} texts and {first['tokens']:,} tokens per cache.\n"


def _lengths(found: dict[str, Any]) -> list[tuple[str, Any]]:
    """Figures by length, and over all where there are several."""
    found = {key: x for key, x in found.items() if key != "counts"}
    return [(key, x) for key, x in found.items() if key != ALL or len(found) > 2]


def _retrieval(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        for task, x in row["figures"]["retrieval"]["tasks"].items():
            for length, y in x["lengths"].items():
                lines.append([row["title"], task, length, *_answers(y)])
    yield table(("cache", "task", "context", *ANSWERS), lines)
    for task in rows[0]["figures"]["retrieval"]["tasks"]:
        yield f"By depth of the fact, {task} (0%: behind the sink, 100%: before the recent window):\n"
        lines = []
        heads: list[str] = []
        for row in rows:
            for length, cells in row["figures"]["retrieval"]["tasks"].get(task, {}).get("map", {}).items():
                heads = ["cache", "context", *[f"{depth}%" for depth in cells]]
                lines.append([row["title"], length, *[f"{x:.2f}" for x in cells.values()]])
        yield table(heads, lines)


ANSWERS = ("asked", "answered", "right", "difference", "p", "cut off")


def _answers(found: dict[str, Any]) -> list[str]:
    """Cells of :data:`ANSWERS`, of figures with rates and counts."""
    numbers = found["counts"]
    asked = [str(numbers[name]) for name in ("asked", "answered")]
    difference = interval(found.get("difference"), sign=True)
    return [*asked, rate(found["right"]), difference, p_value(found), share_cut(numbers)]


def _recall(rows: Sequence[Row]) -> Iterator[str]:
    lines = [
        [row["title"], length, *_answers(x), f"{x['similarity']:.3f}"]
        for row in rows
        for length, x in row["figures"]["recall"]["lengths"].items()
    ]
    yield table(("cache", "tokens", *ANSWERS, "mean similarity"), lines)


def _tasks(rows: Sequence[Row]) -> Iterator[str]:
    found = [(row["title"], row["figures"]["tasks"]["files"]) for row in rows]
    yield table(
        ("cache", "file", *ANSWERS), [[t, name, *_answers(x)] for t, files in found for name, x in files.items()]
    )


def _session(rows: Sequence[Row]) -> Iterator[str]:
    names = ("right", "same", "cut_off", "loops")
    heads = ("cache", "turns", "recalled", "p", "same answer as BF16", "cut off", "p", "loops", "p", "prefix reused")
    lines = []
    for row in rows:
        x = row["figures"]["session"]
        right, same, cut, loops = (x.get(name) for name in names)
        lines.append(
            [row["title"], str(x["turns"]), rate(right), p_value(right), rate(same), rate(cut), p_value(cut),
             rate(loops), p_value(loops), _reuse(x["by_turn"])]
        )  # fmt: skip
    yield table(heads, lines)


def _reuse(turns: Sequence[Row]) -> str:
    """Share of the tokens that the server had seen that it took from its cache, over all turns."""
    known = sum(turn["known"] for turn in turns)
    return f"{sum(turn['cached'] for turn in turns) / known:.2f}" if known else NONE


def _json(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        for length, x in _lengths(row["figures"]["json"]):
            cells = [text for name in ("valid", "complete", "right") for text in (rate(x[name]), p_value(x[name]))]
            lines.append([row["title"], length, str(x["records"]), *cells])
    yield table(("cache", "context", "records", "valid", "p", "complete", "p", "number right", "p"), lines)


def _servers(caches: Sequence[Row]) -> str:
    lines = []
    for row in caches:
        variables = " ".join(f"{name}={value}" for name, value in row["env"].items())
        fit = f", fitted for {row['fitted_for']}" if row.get("fitted_for") else ""
        says = f"{row['title']}{fit}{_cache_facts(row)}"
        lines.append(f"* {says}: `{' '.join([*([variables] if variables else []), *row['args']])}`")
    return "\n".join(lines) + "\n"


def _cache_facts(row: Row) -> str:
    """What an int2 server says of its cache."""
    if (int2 := (row["server"] or {}).get("int2")) is None:
        return ""
    groups = ", ".join(map(str, int2["group_sizes"]))
    return (
        f", recipe {int2['recipe']}, {int2['codes']}, {int2['bits']:.2f} bits without windows, groups of {groups}, "
        f"{int2['sink']} sink and {int2['recent']} recent tokens, fingerprint {int2['fingerprint'][:12]}"
    )


def _effects(rows: Sequence[Row]) -> Iterator[str]:
    chunked = [row["title"].rpartition(", chunks")[0] for row in rows if row.get("chunk")]
    cold, chunks = [], []
    for row in rows:
        for length, x in _lengths(row["figures"]["effects"]):
            excess = x.get("cold_excess")
            kl = [f"{x['cold_nats']:.4f}", interval(x.get("cold_kl")), interval(excess, sign=True), p_value(excess)]
            if not row.get("chunk"):
                cold.append([row["title"], length, interval(x["kl"]), interval(x["moved"])])
            if row.get("chunk") or row["title"] in chunked:
                chunks.append([row["title"], length, *kl])
    yield table(("cache", "context", "KL of cached from cold", "mean difference of log probability"), cold)
    if chunks:
        yield "Texts read cold, by chunk size; rows without one have the server's own:\n"
        yield table(("cache", "context", "nats", "KL from BF16", "excess", "p"), chunks)


SECTIONS: dict[str, Callable[[Sequence[Row]], Iterator[str]]] = {
    "tail-kl": _tail,
    "effects": _effects,
    "retrieval": _retrieval,
    "recall": _recall,
    "tasks": _tasks,
    "session": _session,
    "json": _json,
}
