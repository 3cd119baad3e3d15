"""Plots of a fit report. matplotlib is imported here only; it comes with the extra ``plots``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_rotation.errors import ReportError
from oscar_rotation.report.layer_report import CHOSEN

NAMES = (CHOSEN, "hadamard", "identity")


def draw_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw errors, importance and spectra over layers as PNG files.

    Args:
        report: of a fit with ``report``; see :mod:`oscar_rotation.report.layer_report`.
        folder: where to; made if missing.

    Returns:
        the files.

    Raises:
        ReportError: matplotlib is not installed, or the report holds clip ratios only.
        OSError: if a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("plots need matplotlib: pip install 'sglang-oscar[plots]'") from error
    layers = report["layers"]
    if "k" not in layers[0]:
        raise ReportError("the report holds clip ratios only; fit with --report")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    panels = {
        "errors": [
            ("keys: logit error", lambda layer, name: layer["k"][name]["logit_error"]),
            ("keys: output error", lambda layer, name: layer["k"][name]["output_error"]),
            ("values: output error", lambda layer, name: layer["v"][name]["output_error"]),
            ("both: output error", lambda layer, name: layer["output_error"][name]),
        ],
        "quantizer": [
            ("keys: importance max/mean", lambda layer, name: layer["k"][name]["importance"]),
            ("keys: mean group range", lambda layer, name: _mean(layer["k"][name]["group_ranges"])),
            ("keys: tr(E)", lambda layer, name: layer["k"][name]["residual"]),
            ("values: tr(E)", lambda layer, name: layer["v"][name]["residual"]),
        ],
    }
    index = [layer["layer"] for layer in layers]
    for title, curves in panels.items():
        figure = Figure(figsize=(4 * len(curves), 3.2), layout="constrained")
        for axes, (label, value) in zip(figure.subplots(1, len(curves)), curves, strict=True):
            for name in NAMES:
                axes.plot(index, [value(layer, name) for layer in layers], marker=".", label=name)
            axes.set(title=label, xlabel="layer", yscale="log")
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.axes[0].legend()
        written.append(_save(figure, folder / f"{title}.png"))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, side in zip(figure.subplots(1, 2), ("k", "v"), strict=True):
        for layer in layers:
            top = layer["spectrum"][side]["top"]
            axes.plot(range(1, len(top) + 1), top, alpha=0.5)
        axes.set(title=f"largest eigenvalues, {'C_Q' if side == 'k' else 'C_S'}", xlabel="rank", yscale="log")
    written.append(_save(figure, folder / "spectra.png"))
    return written


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
