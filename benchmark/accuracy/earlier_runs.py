"""Results of earlier runs: gone on with, or put together for one report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def resumed(out: Path, size: str, split: str, calibration: str | None = None) -> dict[str, Any]:
    """What an earlier run saved for the models.

    Args:
        out: its results.
        size, split, calibration: of the run that goes on.

    Raises:
        SystemExit: it measured something else, and its rows would stand beside others.
    """
    before = json.loads(out.read_text(encoding="utf-8"))
    models: dict[str, Any] = before["models"]
    splits = {found["split"] for found in models.values()}
    texts = {found.get("calibration") or "each method's own" for found in models.values()}
    pairs = ("split", splits, split), ("calibration", texts, calibration or "each method's own")
    for what, old, now in (("size", {before["size"]}, size), *pairs):
        if old - {now}:
            raise SystemExit(f"error: {out} has rows of {what} {', '.join(sorted(old))}, not {now}; name another --out")
    return models


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs' results as one, rows of the same model and regime together; of a row the last run wins."""
    out = {**runs[0], "models": {}, "seconds": max(run["seconds"] for run in runs)}
    if commands := dict.fromkeys(run["command"] for run in runs if "command" in run):
        out["command"] = "; ".join(commands)
    for run in runs:
        for model, found in run["models"].items():
            known = out["models"].setdefault(model, {**found, "regimes": {}})["regimes"]
            seconds = sum(data["seconds"] for data in found["regimes"].values())
            for regime, data in found["regimes"].items():
                before = known.get(regime, {})
                rows = before.get("rows", {}) | data["rows"]
                own = f"{run['size']}, {run['device']}, {seconds:.0f} s"
                label = {"run": f"{before['run']}; {own}" if before else own}
                known[regime] = before | data | label | {"rows": rows}
        if "server" in run:
            out["server"] = run["server"]
    return out
