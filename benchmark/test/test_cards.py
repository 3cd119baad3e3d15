"""Cards: the table and what ``oscar doctor`` says are those of the results; a contributed row takes a card's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cards

NEEDED = {
    "gpu",
    "driver",
    "torch",
    "triton",
    "sglang-oscar",
    "command",
    "read_bandwidth_gb_s",
    "decode_kernel",
    "decode",
}


def test_the_table_is_of_the_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cards.py", "--check"])
    assert cards.main() == 0, capsys.readouterr().err


def test_contributed_rows_are_whole() -> None:
    for path in (cards.RESULTS / "cards").glob("*.json"):
        row = json.loads(path.read_text(encoding="utf-8"))
        assert set(row) >= NEEDED, path
        assert row["command"].startswith("oscar bench"), path
        assert all(0 < share <= 1.05 for load in row["decode"] for name, share in load.items() if "_of_" in name), path


def test_a_measured_card_is_no_longer_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cards").mkdir()
    for name in cards.EARLIER:
        (tmp_path / f"{name}.json").write_text((cards.RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(cards, "RESULTS", tmp_path)
    expected = {row["card"]: row for row in cards.cards()}["RTX 4090"]
    assert (expected["basis"], expected["kernel"]) == ("expected", "triton")
    decode = [{"k2v2_of_limit": 0.7, "k3v2_of_limit": 0.5}, {"k2v2_of_limit": 0.9}, {"flashinfer_us": 3.0}]
    row = {"gpu": "NVIDIA GeForce RTX 4090", "decode_kernel": "triton", "decode": decode}
    (tmp_path / "cards" / "4090.json").write_text(json.dumps(row))
    found = {row["card"]: row for row in cards.cards()}
    assert "RTX 4090" not in found
    assert found["NVIDIA GeForce RTX 4090"] == {
        "card": "NVIDIA GeForce RTX 4090", "kernel": "triton", "k2v2": [0.7, 0.9], "k3v2": [0.5, 0.5],
        "basis": "measured",
    }  # fmt: skip
    assert "| GeForce RTX 4090 | Triton | 70-90% | 50% | measured |" in cards.table(list(found.values()))
