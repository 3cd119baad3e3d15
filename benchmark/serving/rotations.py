"""Matrices of the default recipe for a model of random weights: fitted to random activations.

A server does with them what it does with those of a real model: centers, a matrix per head where the recipe has them,
scales that are fitted to the codes. They say nothing about accuracy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from shapes import layer_types

from oscar_rotation.recipes import DEFAULT
from oscar_tools.evaluation.methods import files_of

BENCH_FIT = Path(__file__).resolve().parents[1] / "rotation" / "bench_fit.py"
TOKENS = 4096
"""Of the dump: enough for covariances of full rank, few enough for seconds."""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For all files of this process, which are gone with it: a model's folder may be a user's."""
    return tempfile.TemporaryDirectory(prefix="rotations_")


@cache
def rotations_of(model: Path, bits: str) -> dict[str, str]:
    """Variables that name rotation files for a model folder; they are fitted at the first call.

    Args:
        model: folder with config.json.
        bits: as ``oscar fit --bits`` takes them.

    Raises:
        subprocess.CalledProcessError: the fit failed.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config") or config
    heads = config["num_attention_heads"]
    kinds = layer_types(config)
    attending = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    sizes: dict[str, object] = {
        "layers": len(attending),
        "q-heads": heads,
        "kv-heads": config["num_key_value_heads"],
        "head-dim": config.get("head_dim") or config["hidden_size"] // heads,
    }
    if len(attending) < len(kinds):
        sizes["layer-ids"] = ",".join(map(str, attending))
    out = Path(tempfile.mkdtemp(prefix=f"{bits}_", dir=_folder().name))
    command = [sys.executable, str(BENCH_FIT), "--recipe", DEFAULT, "--bits", bits, "--tokens", str(TOKENS)]
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run([*command, "--rotations", str(out), "--out", str(out / "fit.json")], check=True)
    return files_of(out)
