"""A run of the laboratory that was cut off: what it had measured is in its file, and it goes on with the rest."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy import run  # noqa: E402
from accuracy.scope import SIZES  # noqa: E402

METHODS = ("BF16", "naive INT2 g128", "OSCAR g128")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands a program without a model in the laboratory's place; holds the methods that it measured."""
    rows: list[str] = []
    interval = {"mean": 0.0}

    class Bench:
        def __init__(self, *_: Any) -> None: ...

        def calibration(self, _: str) -> None: ...

        def row(self, method: Any) -> dict[str, Any]:
            if len(rows) == 3:
                raise KeyboardInterrupt  # the machine is taken away
            rows.append(method.name)
            language = {"perplexity": interval, "kl": interval}
            return {"language": language, "retrieval": {}, "fit_seconds": 0.0, "bits": {"131072": 2.0}}

    monkeypatch.setattr(run, "Bench", Bench)
    monkeypatch.setattr(run, "load", lambda *_: (torch.nn.Linear(1, 1), None))
    monkeypatch.setattr(run, "ShippedMaterial", lambda *_: SimpleNamespace(calibration=lambda _: None))
    for name, value in {"is_shipped": True, "all_layers_cached": True, "apply_regime": None}.items():
        monkeypatch.setattr(run, name, lambda *_, value=value: value)
    for name in ("outlier_statistics", "common_direction"):
        monkeypatch.setattr(run, name, lambda _: [])
    return rows


def test_a_run_that_was_cut_off_goes_on(measured: list[str]) -> None:
    args = run.parse_args([word for name in METHODS for word in ("--only", name)])
    size = SIZES["tiny"]
    saved: list[dict[str, Any]] = []

    def go_on(known: dict[str, Any]) -> None:
        measured.clear()
        run.measure_model("model", size, args, lambda out: saved.append(copy.deepcopy(out)), known)

    names = [x.name for x in run.chosen_methods(run.REGIMES[0], size, args, False, set())]
    with pytest.raises(KeyboardInterrupt):
        go_on({})
    assert list(saved[-1]["regimes"]["as trained"]["rows"]) == names[:3]
    with pytest.raises(KeyboardInterrupt):
        go_on(saved[-1])
    regimes = saved[-1]["regimes"]
    assert [list(x["rows"]) for x in regimes.values()] == [names, names[:2]]
    del regimes["as trained"]["rows"][names[0]]
    before = len(saved)
    go_on(saved[-1])
    assert measured == [names[0], *names[2:]]
    assert list(saved[before]["regimes"]["keys x32"]["rows"]) == names[:2], "a later regime's rows stay meanwhile"
