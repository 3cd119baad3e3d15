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
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_triton.py")), *CASES],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert [line.split() for line in done.stdout.splitlines()] == [[case, *KERNELS.split()] for case in CASES]
