"""``fit_report.json``: what a fit measured, written beside the rotations, read back and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.errors import ReportError
from oscar_rotation.report.layer_report import CHOSEN

__all__ = ["REPORT_NAME", "ReportError", "read_report", "render_report", "write_report"]

REPORT_NAME = "fit_report.json"
OTHERS = ("hadamard", "identity")
COLUMNS = {
    "importance": "importance max/mean",
    "residual": "tr(E)",
    "logit_error": "logit error",
    "output_error": "output error",
}


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """Write the report of a fit and return its path.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / REPORT_NAME
    write_text_atomically(path, json.dumps(report, indent=1) + "\n")
    return path


def read_report(source: Path) -> dict[str, Any]:
    """Read a report.

    Args:
        source: the file, or the folder it lies in.

    Raises:
        ReportError: missing, not JSON, or without what a fit measures of layers.
    """
    path = source / REPORT_NAME if source.is_dir() else source
    if not path.exists():
        raise ReportError(f"{path}: no such file; fit with --report")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ReportError(f"{path}: cannot be read ({error}); fit with --report again") from error
    try:
        render_report(content)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ReportError(f"{path}: not a fit report; fit with --report") from None
    return content  # type: ignore[no-any-return]


def render_report(report: dict[str, Any]) -> Group:
    """One table per side and one of output errors, layers as rows; parts that were not measured are left out."""
    layers = report["layers"]
    tables = [_clip_table(layers)] if "k_clip_errors" in layers[0] else []
    if "k" not in layers[0]:
        return Group(*tables)
    tables += [_side_table(layers, side, title) for side, title in (("k", "keys"), ("v", "values"))]
    total = Table(title="relative output error, keys and values quantized", title_justify="left", box=None)
    total.add_column("layer", justify="right")
    names = (CHOSEN, *OTHERS)
    for name in names:
        total.add_column(name, justify="right")
    for layer in layers:
        total.add_row(str(layer["layer"]), *(f"{layer['output_error'][name]:.4f}" for name in names))
    return Group(*tables, total)


def _side_table(layers: list[dict[str, Any]], side: str, title: str) -> Table:
    table = Table(title=f"{title}: chosen / Hadamard / identity", title_justify="left", box=None, header_style="bold")
    table.add_column("layer", justify="right")
    shown = [name for name in COLUMNS if name in layers[0][side][CHOSEN]]
    for name in shown:
        table.add_column(COLUMNS[name], justify="right")
    table.add_column("group ranges", justify="right")
    for layer in layers:
        figures = [layer[side][name] for name in (CHOSEN, *OTHERS)]
        cells = [" / ".join(f"{figure[name]:.3g}" for figure in figures) for name in shown]
        ranges = " / ".join(", ".join(f"{x:.3g}" for x in figure["group_ranges"]) for figure in figures)
        table.add_row(str(layer["layer"]), *cells, ranges)
    return table


def _clip_table(layers: list[dict[str, Any]]) -> Table:
    table = Table(title="fitted clip ratios", title_justify="left", box=None, header_style="bold")
    for name in ("layer", "keys", "values"):
        table.add_column(name, justify="right")
    for layer in layers:
        best = [min(layer[f"{side}_clip_errors"].items(), key=lambda item: item[1])[0] for side in ("k", "v")]
        table.add_row(str(layer["layer"]), *best)
    return table
