"""docs/refused.md says what the server refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import list_refused


def test_page_is_what_the_tables_say() -> None:
    assert list_refused.PAGE.read_text(encoding="utf-8") == list_refused.page(), "run python scripts/list_refused.py"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("set --pp-size 1", "set `--pp-size 1`"),
        ("drop --a-b, or --c", "drop `--a-b`, or `--c`"),
        ("drop --speculative-algorithm, or set it to NGRAM", "drop `--speculative-algorithm`, or set it to NGRAM"),
        ("set --hicache-io-backend kernel or direct", "set `--hicache-io-backend` kernel or direct"),
        ("unset SGLANG_X_Y", "unset `SGLANG_X_Y`"),
    ],
)
def test_flags_are_code(text: str, printed: str) -> None:
    assert list_refused.code(text) == printed
