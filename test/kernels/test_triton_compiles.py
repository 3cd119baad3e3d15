"""All Triton kernels compile for every kind of supported GPU by Triton's assembler, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
_broken_rows_kernel _fill_decode_tables _finite_kernel _merge_states_kernel _prefix_kernel _rotate_kernel _sinks_kernel
_store_kernel decode_kernel extend_kernel merge_kernel
"""
CASES = ["90,2:codebook,2,128", "80,3,4,128", "100,2,2,192", "89,16,2:symmetric,256"]
"""Compute capability, keys, values, channels of a head."""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    """In one process, which imports SGLang once."""
    lines = compiled("compile_triton.py", *CASES, cache=tmp_path)
    assert lines == [[case, *KERNELS.split()] for case in CASES]


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_launches_need(tmp_path: Path) -> None:
    """Of two kinds of layers, not one kernel is left; and the error of one that does not compile is its launch's."""
    *counts, wrong = compiled("compile_ahead.py", cache=tmp_path)
    assert wrong == ["True"]
    assert len(counts) == 2
    for ahead, left in counts:
        assert int(ahead) > 10
        assert left == "0"


def compiled(script: str, *args: str, cache: Path) -> list[list[str]]:
    """Words of the lines that a script of this folder prints, without Triton's interpreter and with an empty cache."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *args],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]
