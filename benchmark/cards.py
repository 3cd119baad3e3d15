"""What share of its bandwidth decode reaches on which card: for the table of benchmark/README.md and ``oscar doctor``.

    python benchmark/cards.py            # writes both
    python benchmark/cards.py --check    # exit status 1 if one differs

Measured are cards with a file in results/cards, as ``oscar bench`` writes it, and two that were measured before. For
others the Triton kernel's shares on an H200 are scaled by the cycles that multiprocessors have while a token is read.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from oscar_tools.bench.cards import DATA

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"
PAGE = ROOT / "benchmark" / "README.md"
EARLIER = ("h200_kernels_decode", "h100_kernels_decode")
"""Results of bench_decode.py that say what a card does."""
WIDTHS = {"k2v2": "", "k3v2": ":k3v2"}
"""Bits of rows, and how columns of bench_decode.py name them."""
H200_CYCLES = 30
CYCLES = {"A100": 46, "L40S": 239, "RTX 4090": 194, "RTX 5090": 138, "B200": 21}
"""Of one multiprocessor per token of 8 kv heads of 128 channels in 2 bits (576 bytes), all of them reading at the
card's bandwidth: multiprocessors x clock x 576 / bandwidth, by data sheets."""
MOST = 0.95
"""What no kernel was seen to exceed by much."""
TABLE = re.compile(r"(?<=\n)\| card \|.*?(?=\n\n)", re.DOTALL)


def result(name: str) -> Any:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def span(rows: list[dict[str, Any]], column: str) -> list[float] | None:
    """Smallest and largest number of a column; None where no row has it."""
    found = [row[column] for row in rows if row.get(column) is not None]
    return [min(found), max(found)] if found else None


def cards() -> list[dict[str, Any]]:
    """A row for every card: what decodes there, and shares of the bandwidth by bits."""
    found = {}
    for name in EARLIER:
        of = result(name)
        shares = {widths: span(of["rows"], f"cuda{ending}_of_limit") for widths, ending in WIDTHS.items()}
        found[of["gpu"]] = {"kernel": "cuda", **shares, "basis": "measured"}
    for path in sorted((RESULTS / "cards").glob("*.json")):
        of = json.loads(path.read_text(encoding="utf-8"))
        shares = {widths: span(of["decode"], f"{widths}_of_limit") for widths in WIDTHS}
        found[of["gpu"]] = {"kernel": of["decode_kernel"], **shares, "basis": "measured"}
    rows = result(EARLIER[0])["rows"]
    triton = {widths: span(rows, f"triton{ending}_of_limit") for widths, ending in WIDTHS.items()}
    for card, cycles in CYCLES.items():
        if not any(card in name for name in found):
            scaled = {
                widths: shares and [round(min(share * cycles / H200_CYCLES, MOST), 2) for share in shares]
                for widths, shares in triton.items()
            }
            found[card] = {"kernel": "triton", **scaled, "basis": "expected"}
    return [{"card": card, **row} for card, row in found.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the page."""
    lines = ["| card | decode | of its bandwidth, 2 bits | default | |", "|---|---|---|---|---|"]
    for row in rows:
        shares = ["-" if row[of] is None else _percent(*row[of]) for of in WIDTHS]
        cells = [row["card"].removeprefix("NVIDIA "), NAMES[row["kernel"]], *shares, row["basis"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NAMES = {"cuda": "CUDA", "triton": "Triton"}


def _percent(low: float, high: float) -> str:
    ends = dict.fromkeys(f"{100 * share:.0f}" for share in (low, high))
    return f"{'-'.join(ends)}%"


def main() -> int:
    rows = cards()
    page = PAGE.read_text(encoding="utf-8")
    wanted = {DATA: json.dumps(rows, indent=1) + "\n", PAGE: TABLE.sub(table(rows), page)}
    if "--check" not in sys.argv:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return 0
    differ = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    for path in differ:
        print(f"{path.relative_to(ROOT)} differs: run python benchmark/cards.py", file=sys.stderr)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
