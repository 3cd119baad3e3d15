"""Which classes of models are served: those that were tried, by a table that ``scripts/try_classes.py`` writes."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang_oscar.errors import Int2Error

TABLE = Path(__file__).with_name("model_classes.csv")
"""A row for every class of the newest release: class, what int2 mode does, and why or how that is known."""
SERVED, REFUSED, UNTRIED = "served", "refused", "not tried"
ALLOW = "SGLANG_OSCAR_ALLOW_UNTRIED"
"""Variable that lets a class serve that was not tried."""


@dataclass(frozen=True)
class Row:
    """What is known of a class.

    Attributes:
        int2: one of ``SERVED``, ``REFUSED`` and ``UNTRIED``.
        known: why, or how that is known.
    """

    int2: str
    known: str


@cache
def rows() -> dict[str, Row]:
    """The table, by class."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {line["class"]: Row(line["int2"], line["known"]) for line in csv.DictReader(file)}


def check(architectures: Iterable[str], name: str) -> None:
    """Refuse classes that the table does not have as served.

    Args:
        architectures: those of a model's configuration; SGLang takes one of them.
        name: of the model, for the message.

    Raises:
        Int2Error: naming the model, the reason, and what to change.
    """
    found = [rows().get(architecture, Row(UNTRIED, "no such class was there")) for architecture in architectures]
    if not found or any(row.int2 == SERVED for row in found):
        return
    if found[0].int2 == REFUSED:
        raise Int2Error(f"--kv-cache-dtype int2 does not support {name}: {found[0].known}; use --kv-cache-dtype auto")
    if os.environ.get(ALLOW, "").lower() not in ("1", "true", "t", "yes", "y", "on"):
        raise Int2Error(
            f"--kv-cache-dtype int2 has not been tried with {name}: {found[0].known}; try it with `oscar try-class` "
            f"and set {ALLOW}=1, or use --kv-cache-dtype auto"
        )
