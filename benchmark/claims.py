"""What README and docs claim, and where the results say it; :mod:`check_claims` compares."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from check_claims import ROOT, Claim

WHOLE: tuple[str, ...] = ()
"""Pages whose tables are claimed row by row."""


@cache
def result(name: str) -> Any:
    """A committed result."""
    return json.loads((ROOT / "benchmark" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def all_claims() -> list[Claim]:
    """Every claim."""
    return []
