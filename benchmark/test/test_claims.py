"""What README and docs say, held against the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))
from check_claims import Claim, faults, is_rounded
from claims import WHOLE, all_claims

PAGE = """# Speed

It is 2.7 times as
fast, in 1,234 of 1,300 runs.

| cache | us | of limit |
|---|---|---|
| INT2 | 24.0 | .54 |
| FP8 | 71 | - |
"""
SAID = (
    Claim("page.md", "It is {} times as fast, in {} of 1,300 runs", (2.6512, 1234)),
    Claim("page.md", "| INT2 | {} | {} |", (23.96, 0.5449)),
    Claim("page.md", "| FP8 | {} | - |", (71.3,)),
)


def faults_in(folder: Path, *claims: Claim, page: str = PAGE) -> list[str]:
    (folder / "page.md").write_text(page)
    return faults(claims, ["page.md"], folder)


def test_pages_agree_with_the_results() -> None:
    assert faults(all_claims(), WHOLE) == []


def test_a_true_page_has_no_faults(tmp_path: Path) -> None:
    assert faults_in(tmp_path, *SAID) == []


@pytest.mark.parametrize(
    ("found", "written", "fault"),
    [
        ("2.7 times", "2.6 times", "says 2.6, measured is 2.6512"),
        ("24.0", "24.1", "says 24.1, measured is 23.96"),
        ("It is", "It was", "no longer says"),
    ],
)
def test_a_number_that_differs_is_a_fault(tmp_path: Path, found: str, written: str, fault: str) -> None:
    (line,) = [line for line in faults_in(tmp_path, *SAID, page=PAGE.replace(found, written)) if "no claim" not in line]
    assert fault in line


def test_a_table_row_that_nobody_claims_is_a_fault(tmp_path: Path) -> None:
    assert faults_in(tmp_path, *SAID[:2]) == ["page.md: no claim is about the table row '| FP8 | 71 | - |'"]


@pytest.mark.parametrize(
    ("shown", "value", "right"),
    [(".54", 0.5449, True), (".54", 0.546, False), ("1,234", 1234.4, True), ("-3", -2.6, True), ("24.0", 24.06, False)],
)
def test_rounding_is_to_the_digits_shown(shown: str, value: float, right: bool) -> None:
    assert is_rounded(shown, value) is right
