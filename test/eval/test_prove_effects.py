"""Cold against cached: what is compared with what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from oscar_tools.evaluation.prove.divergence import TopTokens
from oscar_tools.evaluation.prove.measures import Effects, Material
from oscar_tools.evaluation.prove.page import SECTIONS
from oscar_tools.evaluation.prove.sizes import SIZES, TAIL
from oscar_tools.evaluation.prove.store import Store
from oscar_tools.evaluation.prove.texts import Texts
from support.reference import MODEL


class Reader:
    """Knows the token that is read, with probability ``cold`` or ``cached``, and one other."""

    def __init__(self, cold: float, cached: float) -> None:
        self.cold, self.warm = cold, cached

    def read(self, ids: list[int], begin: int, top: int, cached: bool = True) -> TopTokens:
        first = self.warm if cached else self.cold
        count = len(ids) - begin - 1
        other = np.full((count, 1), np.log(1 - first), dtype=np.float32)
        return TopTokens(np.full((count, 1), -1, dtype=np.int32), other, np.full(count, np.log(first), np.float32))


def kl(p: float, q: float) -> float:
    return float(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def test_what_is_compared_with_what(tmp_path: Path) -> None:
    measure = Effects(Material(Texts(AutoTokenizer.from_pretrained(MODEL)), SIZES["reduced"], (1024,), 8192))
    found = {}
    cells = {name: Store(tmp_path).cell(name, "effects", {}) for name in ("bf16", "int2")}
    for name, cold, cached in (("bf16", 0.5, 0.5), ("int2", 0.6, 0.8)):
        reference = None if name == "bf16" else cells["bf16"]
        for unit in measure.units():
            cells[name].add(unit, measure.ask(Reader(cold, cached), unit, cells[name], reference))  # type: ignore[arg-type]
        answers = cells["bf16"].done
        found[name] = measure.figures(cells[name].done, None if name == "bf16" else answers)["all"]
    exact, few = found["bf16"], found["int2"]
    assert (exact["kl"]["mean"], exact["moved"]["mean"]) == (0, 0)
    assert "cold_kl" not in exact
    assert few["kl"]["mean"] == pytest.approx(kl(0.6, 0.8), rel=1e-4)
    assert few["moved"]["mean"] == pytest.approx(np.log(0.8 / 0.6), rel=1e-4)
    assert few["cold_kl"]["mean"] == pytest.approx(kl(0.5, 0.6), rel=1e-4)
    assert few["cold_excess"]["difference"] == pytest.approx(np.log(0.5 / 0.6), rel=1e-4)
    assert len(cells["int2"].done["1024-0"]["kl"]) == TAIL - 1
    rows = [{"title": name, "figures": {"effects": {"all": x, "1024": x}}} for name, x in found.items()]
    (text,) = SECTIONS["effects"](rows)
    assert f"| int2 | 1024 | {kl(0.6, 0.8):.3g} (" in text
