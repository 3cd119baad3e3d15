"""Where tests of CUDA kernels run: on a Hopper GPU, or on a CPU thread by thread."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from support.cuda_emulator import COMPILER, emulated

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MARKS = [
    pytest.mark.skipif(COMPILER is None and not HOPPER, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs compute capability 9.0"),
]
DEVICE = torch.device("cuda" if HOPPER else "cpu")
running = nullcontext if HOPPER else emulated
"""What kernels are launched in."""
