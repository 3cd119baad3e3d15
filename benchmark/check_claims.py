"""Whether README and docs say what the committed results say.

    python benchmark/check_claims.py      # prints every number that differs; exit status 1 if there is one

:mod:`claims` lists what the pages claim: a piece of a page with ``{}`` in the place of every number, and the numbers as
the result files have them. A number is right if it is the measured one, rounded to the digits that the page shows. In
pages of :data:`claims.WHOLE` every table row that holds a measured number must be claimed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"


class Claim(NamedTuple):
    """A piece of a page.

    Attributes:
        page: file, from the root of the repository.
        text: as it stands there, with ``{}`` for each number; how lines break does not matter.
        values: the measured numbers, in that order.
    """

    page: str
    text: str
    values: tuple[float, ...]


def squeezed(text: str) -> str:
    """Text with every run of white space as one space."""
    return " ".join(text.split())


def pattern_of(claim: Claim) -> re.Pattern[str]:
    """What finds a claim in its squeezed page, with a group for every number."""
    return re.compile(f"({NUMBER})".join(re.escape(part) for part in squeezed(claim.text).split("{}")))


def is_rounded(shown: str, value: float) -> bool:
    """Whether a number as a page shows it is ``value``, rounded to as many digits."""
    decimals = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - value) <= 0.5000001 * 10**-decimals


def faults_of(claim: Claim, page: str) -> Iterator[str]:
    """What is wrong with a claim, a line each.

    Args:
        claim: one.
        page: its page, squeezed.
    """
    if claim.text.count("{}") != len(claim.values):
        yield f"{claim.page}: {claim.text!r} has {claim.text.count('{}')} numbers, its claim {len(claim.values)}"
        return
    found = pattern_of(claim).search(page)
    if found is None:
        yield f"{claim.page}: no longer says {claim.text!r}; measured: {', '.join(f'{v:.6g}' for v in claim.values)}"
        return
    for shown, value in zip(found.groups(), claim.values, strict=True):
        if not is_rounded(shown, value):
            yield f"{claim.page}: {found.group(0)!r} says {shown}, measured is {value:.6g}"


def table_rows(page: str) -> Iterator[str]:
    """Rows of a page's tables that hold a number behind their first cell, heads left out."""
    lines = page.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_head = re.fullmatch(r"\|[-| :]+\|", following)
        if line.startswith("|") and not is_head and re.search(r"\d", "|".join(line.split("|")[2:])):
            yield line


def unclaimed(name: str, page: str, claims: Iterable[Claim]) -> Iterator[str]:
    """Table rows of a page that no claim is about, a line each."""
    patterns = [pattern_of(claim) for claim in claims if claim.page == name]
    for row in table_rows(page):
        if not any(pattern.search(squeezed(row)) for pattern in patterns):
            yield f"{name}: no claim is about the table row {row!r}"


def faults(claims: Iterable[Claim], whole: Iterable[str], root: Path = ROOT) -> list[str]:
    """Everything that differs, a line each.

    Args:
        claims: what pages claim.
        whole: pages whose tables must be claimed row by row.
        root: of the repository.
    """
    claims = list(claims)
    pages = {name: (root / name).read_text(encoding="utf-8") for name in {*whole, *(claim.page for claim in claims)}}
    found = [fault for claim in claims for fault in faults_of(claim, squeezed(pages[claim.page]))]
    return found + [fault for name in whole for fault in unclaimed(name, pages[name], claims)]


def main() -> int:
    """Print what differs; the exit status."""
    from claims import WHOLE, all_claims

    claims = all_claims()
    wrong = faults(claims, WHOLE)
    print("\n".join(wrong or [f"{len(claims)} claims agree with the results"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
