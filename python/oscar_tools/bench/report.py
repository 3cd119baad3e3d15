"""Tables on the terminal, and what a measurement depends on besides what is measured."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "sglang-kernel", "flashinfer-python")
"""Whose kernels ours are compared with."""
Rows = Sequence[dict[str, Any]]


def printed(rows: Rows) -> list[str]:
    """Lines of a table with the columns of all rows; what a row lacks is a dash."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def rounded(rows: Rows) -> list[dict[str, Any]]:
    """For JSON: numbers with three decimals."""
    return [{c: round(v, 3) if isinstance(v, float) else v for c, v in row.items()} for row in rows]


def gpu_facts() -> dict[str, Any]:
    """The card and the versions of what ran on it; needs a GPU."""
    import torch
    import triton

    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return facts | {"triton": triton.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def driver() -> str:
    """Version of the NVIDIA driver, or unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        lines = []
    return lines[0] if lines else "unknown"


def versions() -> dict[str, str]:
    """Of the packages that bring stock kernels, where they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line(program: str) -> str:
    """What was typed, with ``program`` in the place of its path."""
    return shlex.join([*shlex.split(program), *sys.argv[1:]])


def report(name: str, rows: Rows, limit: float, path: str | None) -> None:
    """Print a table of a benchmark script and write it with what it was measured on."""
    print("\n".join(printed(rows)))
    print(f"read bandwidth measured: {limit:.0f} GB/s", flush=True)
    facts = {"benchmark": name, **gpu_facts(), "command": command_line(f"python {sys.argv[0]}")}
    result = {**facts, "read_bandwidth_gb_s": round(limit, 1), "rows": rounded(rows)}
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
