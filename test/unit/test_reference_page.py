"""docs/reference.md says what the code says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from sglang_oscar.memory.facts import FACTS
from support.server_answers import INT2

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import reference


def test_page_is_what_the_code_says() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python scripts/reference.py"


def test_a_page_that_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "PAGE", tmp_path / "reference.md")
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 1
    assert "run python scripts/reference.py" in capsys.readouterr().err


def test_facts_are_those_of_a_server() -> None:
    assert set(FACTS) == set(INT2)


def test_a_setting_needs_a_description() -> None:
    class Undescribed(BaseModel):
        number: int = Field(1, alias="SGLANG_OSCAR_NUMBER")

    with pytest.raises(ValueError, match=r"Undescribed\.number has no description"):
        list(reference.variables(Undescribed))


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
    assert reference.code(text) == printed
