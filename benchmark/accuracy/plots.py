"""Plots of a run: errors by layer and attention KL by context length. matplotlib comes with the extra ``plots``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accuracy.scope import FIGURES

PANELS = (
    ("k", "keys"),
    ("v", "values"),
    ("logits", "Q K^T"),
    ("mixed_values", "S V"),
    ("attention_kl", "attention KL"),
    ("attention_output", "attention output"),
    ("hidden", "hidden state"),
    ("kl_by_length", "attention KL by context"),
)
TITLE = "relative squared error by layer (KL in nats)"


def draw_all(results: dict[str, Any], folder: Path) -> dict[str, Path]:
    """One figure per model and regime (the paper's figures 2, 3 and 8).

    Args:
        results: of a run.
        folder: where to; made if missing.

    Returns:
        "model/regime" -> path relative to the parent of ``folder``.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'sglang-oscar[plots]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for model, found in results["models"].items():
        for regime, data in found["regimes"].items():
            figure = Figure(figsize=(13, 5.2), layout="constrained")
            _draw(figure, data["rows"])
            figure.suptitle(f"{model}, {regime}: {TITLE}")
            name = f"accuracy-{model}-{regime}.png".replace(" ", "-").replace(",", "")
            figure.savefig(folder / name, dpi=80, metadata={"Software": None})
            drawn[f"{model}/{regime}"] = Path(folder.name) / name
    return drawn


def _draw(figure: Any, rows: dict[str, Any]) -> None:
    axes = figure.subplots(2, 4).flatten()
    shown = [name for name in FIGURES if name in rows and "layers" in rows[name]]
    for axis, (key, label) in zip(axes, PANELS, strict=True):
        if key == "kl_by_length" and not any(rows[name]["kl_by_length"] for name in shown):
            axis.set_axis_off()
            continue
        for name in shown:
            row = rows[name]
            if key == "kl_by_length":
                points = row["kl_by_length"]
                lengths = sorted(map(int, points))
                means = [points[str(n)]["mean"] for n in lengths]
                spread = [
                    [max(0.0, points[str(n)]["mean"] - points[str(n)]["low"]) for n in lengths],
                    [max(0.0, points[str(n)]["high"] - points[str(n)]["mean"]) for n in lengths],
                ]
                axis.errorbar(lengths, means, yerr=spread, marker="o", markersize=3, label=name)
                axis.set_xscale("log", base=2)
            else:
                values = row["language"]["hidden"] if key == "hidden" else row["layers"][key]
                axis.plot(range(len(values)), values, marker="o", markersize=3, label=name)
                axis.set_xticks(range(len(values)))
        axis.set_yscale("log")
        axis.set_title(label, fontsize=10)
    axes[0].legend(fontsize=7)
