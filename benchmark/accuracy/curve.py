"""KL by mean bits of every code that was tried, and which code a number of bits is best spent on.

    python benchmark/accuracy/curve.py --from choice.json --from report.json --page benchmark/results/codes.md

Results are those of ``accuracy/run.py``, of one split each: codes are chosen on the choice split and told with what
they lose on the report split. Beside the page goes a figure of every model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmark", "scripts", "kernels", "rotation", "python")]

from accuracy_figures import BITS_AT, Rows, mean_kl  # noqa: E402
from figures import new_figure, save  # noqa: E402

from accuracy import scope  # noqa: E402
from accuracy.report import table  # noqa: E402

CEILINGS = (1.2, 1.7, 2.0, 2.17, 2.23, 2.29, 2.42, 2.54, 2.79, 3.2)
"""Mean bits at 128K tokens of context that are spent."""


@dataclass
class Found:
    """A model's rows by split, "choice" and "report", and of which runs they are."""

    splits: dict[str, Rows] = field(default_factory=lambda: {"choice": {}, "report": {}})
    runs: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Methods of either split, by bits."""
        rows = self.splits["choice"] | self.splits["report"]
        return sorted((name for name in rows if name != "BF16"), key=lambda name: (self.bits(name), name))

    def bits(self, name: str) -> float:
        """Mean bits of an element."""
        row = self.splits["choice"].get(name) or self.splits["report"][name]
        return float(row["bits"][BITS_AT])

    def kl(self, name: str, split: str) -> float | None:
        """KL to BF16 over all kinds of text; None where it was not measured."""
        row = self.splits[split].get(name)
        return None if row is None else mean_kl(row)


def read(paths: Sequence[Path]) -> dict[str, Found]:
    """Rows of all models as they were trained; of another calibration than the usual one apart."""
    models: dict[str, Found] = {}
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        for name, model in results["models"].items():
            text = model.get("calibration", "each method's own")
            usual = text in ("broad", "each method's own")
            found = models.setdefault(name if usual else f"{name}, calibrated on {text} text", Found())
            for data in (x for regime, x in model["regimes"].items() if regime == "as trained"):
                found.splits[model["split"]].update(data["rows"])
                about = f"{model['split']} split, size {results['size']}, calibrated on {text} text"
                found.runs.append(f"`{path.name}` ({about}; {results['device']}, {data['seconds']:.0f} s)")
    return models


def is_served(name: str) -> bool:
    """Whether servers have the codes of a row: scalars of this project's recipes."""
    return name in scope.SERVED or name in scope.SETS["chart"]


def best(found: Found, ceiling: float, served: bool = False) -> str | None:
    """The method that loses least on the choice split with no more bits; of served ones where asked."""
    within = [
        name
        for name in found.splits["choice"]
        if name != "BF16" and found.bits(name) <= ceiling and (is_served(name) or not served)
    ]
    return min(within, key=lambda name: found.kl(name, "choice") or 0.0, default=None)


def shown(kl: float | None) -> str:
    """A KL in a cell."""
    return "-" if kl is None else f"{kl:.4f}"


def decision(found: Found) -> Iterator[str]:
    """By bits: the code chosen on the choice split, what it loses on the report split, and what served codes lose."""
    body, last = [], None
    for ceiling in CEILINGS:
        chosen, scalars = best(found, ceiling), best(found, ceiling, served=True)
        if chosen is None or chosen == last:
            continue
        last = chosen
        cells = [f"{ceiling:.2f}", chosen, f"{found.bits(chosen):.2f}"]
        cells += [shown(found.kl(chosen, split)) for split in ("choice", "report")]
        body.append([*cells, scalars or "-", shown(found.kl(scalars, "report") if scalars else None)])
    head = ["bits at most", "chosen", "bits", "KL, choice", "KL, report", "best that is served", "KL, report"]
    yield from table(head, body)


def everything(found: Found) -> Iterator[str]:
    """Every method by bits; bold where none with as few bits or fewer loses less."""
    lengths = sorted({n for rows in found.splits.values() for row in rows.values() for n in row["retrieval"]}, key=int)
    head = ["code", "bits", "KL, choice", "KL, report", *(f"retrieval, {n}" for n in lengths)]
    body, least = [], {"choice": float("inf"), "report": float("inf")}
    for name in found.names():
        cells = [name, f"{found.bits(name):.2f}"]
        for split, before in list(least.items()):
            kl = found.kl(name, split)
            front = kl is not None and kl < before
            if kl is not None and front:
                least[split] = kl
            cells.append(f"**{shown(kl)}**" if front else shown(kl))
        asked = (found.splits["report"].get(name) or found.splits["choice"][name])["retrieval"]
        body.append([*cells, *(f"{asked[n]['accuracy']['mean']:.2f}" if n in asked else "-" for n in lengths)])
    yield from table(head, body)


def draw(name: str, found: Found, path: Path) -> None:
    """KL by bits: codes of kv heads, scalars that are served, and everything else."""
    split = "report" if found.splits["report"] else "choice"
    rows: dict[str, Any] = found.splits[split]
    kinds: dict[str, list[str]] = {"scalars, as served": [], "codes tried here": [], "other methods": []}
    for method in (x for x in found.names() if x in rows):
        tried = rows[method]["table"] in ("combinations", "codebooks")
        kinds["scalars, as served" if is_served(method) else "codes tried here" if tried else "other methods"].append(
            method
        )
    figure = new_figure(width=6.5)
    axis = figure.subplots()
    for (label, names), (color, marker) in zip(
        kinds.items(), (("#7b3294", "*"), ("#c51b7d", "x"), ("#7f8c8d", ".")), strict=True
    ):
        points = [(found.bits(x), found.kl(x, split)) for x in names]
        axis.scatter(*zip(*points, strict=True), label=label, color=color, marker=marker) if points else None
    axis.set(xlabel="mean bits per element at 128K tokens", ylabel="KL to BF16, nats per token", yscale="log")
    axis.set_xlim(1, 4.2)
    axis.legend(frameon=False)
    figure.suptitle(f"{name}, {split} split", fontsize=10)
    save(figure, path)


def page(models: dict[str, Found], figures: dict[str, str]) -> Iterator[str]:
    """The page, line by line."""
    yield from (INTRODUCTION, "")
    for name, found in models.items():
        yield from (f"## {name}", "", f"Runs: {'; '.join(found.runs)}.", "")
        if name in figures:
            yield from (f"![KL by bits]({figures[name]})", "")
        if found.splits["choice"]:
            yield from ("What so many bits are best spent on:", "", *decision(found), "")
        yield from ("Everything that was tried:", "", *everything(found), "")


def main(argv: list[str] | None = None) -> None:
    """Read results, write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="sources", action="append", type=Path, required=True, help="repeatable")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmark" / "results" / "codes.md")
    parser.add_argument("--no-figures", action="store_true")
    args = parser.parse_args(argv)
    models, figures = read(args.sources), {}
    for name, found in {} if args.no_figures else models.items():
        figures[name] = f"figures/codes-{name}.svg".replace(", ", "-").replace(" ", "-")
        draw(name, found, args.page.parent / figures[name])
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text("\n".join(page(models, figures)).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {args.page}")


INTRODUCTION = """# Codes of keys and values, by bits

How few bits a cache can have, and what they are best spent on: KL to BF16 of the next token, nats, mean over kinds of
text, by mean bits of an element at 128K tokens of context (scales, zero points and 16-bit windows are counted).

*Fours* are an index for four neighbouring channels of a row behind the transform of `focus`; a row has one scale and no
zero point. Points of keys are fitted, for every kv head and four channels of their own unless a row says what shares a
book; those of values are of a normal distribution, the same everywhere. *By head*: every kv head has the code where it
saves most of the attention's KL (keys) or of the output's error (values), on calibration text. Servers have
scalars and, with `--key-coding codebook`, fours of one book a layer with a factor for each place; the others show what
is left to gain."""


if __name__ == "__main__":
    main()
