"""What is known of decode on a card: measured, expected, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).with_name("cards.json")
"""Rows of cards, written by benchmark/cards.py of the repository."""


def known(gpu: str, kernel: str) -> str:
    """What share of its read bandwidth a kernel reaches with 2 bits, in a few words.

    Args:
        gpu: the card's name, as its driver gives it.
        kernel: ``cuda`` or ``triton``.
    """
    for row in json.loads(DATA.read_text(encoding="utf-8")):
        named = row["card"] == gpu if row["basis"] == "measured" else row["card"] in gpu
        if named and row["kernel"] == kernel:
            low, high = row["k2v2"]
            basis = "measured" if row["basis"] == "measured" else "expected, not measured,"
            reach = f"{low:.0%} to {high:.0%}" if low < high else f"{high:.0%}"
            return f"{basis} at {reach} of the card's read bandwidth with 2 bits"
    return "never timed on this card; oscar bench does so in two minutes"
