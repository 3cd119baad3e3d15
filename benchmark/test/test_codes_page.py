"""The page of codes by bits: chosen on one split, told with the other."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy import curve, scope  # noqa: E402

FOURS = "focus, keys in fours, values in fours"
K3V2 = f"{scope.FOCUS}, --bits k3v2"


def run(split: str, rows: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Results of one model: bits and KL by method."""
    measured = {
        name: {
            "table": "bits",
            "bits": {curve.BITS_AT: bits},
            "language": {"kl": {"mean": kl}},
            "kinds": {"chat": {"kl": {"mean": 3 * kl}}},
            "retrieval": {"1024": {"accuracy": {"mean": 1.0}}},
        }
        for name, (bits, kl) in rows.items()
    }
    regimes = {"as trained": {"rows": measured, "seconds": 60.0}}
    return {"size": "full", "device": "GPU", "models": {"m": {"split": split, "regimes": regimes}}}


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    choice = {"BF16": (16.0, 0.0), scope.FOCUS: (2.28, 0.003), FOURS: (2.16, 0.002), "NOVA-KV": (2.22, 0.0025)}
    report = choice | {FOURS: (2.16, 0.004), "NOVA-KV": (2.22, 0.001), K3V2: (2.78, 0.0005)}
    paths = []
    for split, rows in {"choice": choice | {K3V2: (2.78, 0.001)}, "report": report}.items():
        paths.append(tmp_path / f"{split}.json")
        paths[-1].write_text(json.dumps(run(split, rows)))
    return paths


def test_codes_are_chosen_on_one_split_and_told_with_the_other(sources: list[Path], tmp_path: Path) -> None:
    """What another loses on the report split decides nothing; the best that is served stands beside it."""
    args = [word for path in sources for word in ("--from", str(path))]
    curve.main([*args, "--page", str(tmp_path / "codes.md"), "--no-figures"])
    text = (tmp_path / "codes.md").read_text()
    chosen = text.split("best spent on:\n\n")[1].split("\n\n")[0].splitlines()[2:]
    assert chosen == [
        f"| 2.17 | {FOURS} | 2.16 | 0.0040 | 0.0080 | - | - |",
        f"| 2.79 | {K3V2} | 2.78 | 0.0020 | 0.0010 | {K3V2} | 0.0010 |",
    ]
    assert "| NOVA-KV | 2.22 | 0.0050 | **0.0020** | 1.00 |" in text
    assert "`choice.json` (choice split, size full, calibrated on each method's own text; GPU, 60 s)" in text


def test_the_figure_is_drawn(sources: list[Path], tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    curve.main(["--from", str(sources[1]), "--page", str(tmp_path / "codes.md")])
    assert "figures/codes-m.svg" in (tmp_path / "codes.md").read_text()
    assert "report split" in (tmp_path / "figures" / "codes-m.svg").read_text()
