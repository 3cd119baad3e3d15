"""compute-sanitizer finds no bad access and no race in the kernels, on small cases."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(not Path(TOOL).exists(), reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_kernels_are_clean(kernels: str, tool: str) -> None:
    if kernels == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CUDA kernel needs a GPU of compute capability 9.0")
    cases = str(TESTS / "gpu" / "sanitize_cases.py")
    paths = [str(TESTS), str(TESTS / "kernels"), os.environ.get("PYTHONPATH", "")]
    # cuda-python asks the driver for every function it knows, newer ones too: those calls fail and mean nothing. Other
    # failing calls raise an exception.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    done = subprocess.run(
        [TOOL, "--tool", tool, *options, "--error-exitcode", "9", sys.executable, cases, kernels],
        # One allocation per tensor, so that reading past the end of one is seen.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "all cases done" in output
    assert "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output
