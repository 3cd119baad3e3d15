"""How the figures of README and docs look, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(height: float = 4.0, width: float = 9.5) -> Any:
    """An empty figure of ``width``, by default the README's, and ``height`` in inches.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'sglang-oscar[plots]'") from None
    # Text stays text and ids do not change from run to run: small files that can be compared.
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sglang-oscar", "font.size": 9, "axes.titlesize": 9})
    rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False})
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, path: Path) -> None:
    """Write a figure without the date of its making."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
