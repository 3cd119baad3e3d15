"""Triton's names for PyTorch's dtypes."""

from __future__ import annotations

import torch
import triton.language as tl

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
