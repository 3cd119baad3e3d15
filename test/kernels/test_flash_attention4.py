"""Extend through FlashAttention-4: SGLang's kernel compiles for Blackwell as it is called here, without the card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_oscar.attention.flash_attention4 import FlashAttention4

PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from sglang_oscar.attention.flash_attention4 import FlashAttention4

kernel = FlashAttention4(torch.device("cuda"))
with FakeTensorMode():
    starts = torch.empty(4, dtype=torch.int32, device="cuda")
    q, k, v = (torch.empty(200, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    kernel._lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 150, "max_seqlen_k": 150}
    out, sums = kernel.forward_return_lse(q, k, v, causal=True, sm_scale=0.1)
    print(*out.shape, out.dtype, *sums.shape, sums.dtype)
"""


@pytest.mark.skipif(not FlashAttention4.installed(), reason="FlashAttention-4 is not installed")
@pytest.mark.parametrize("architecture", ["sm_100", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_it_compiles(architecture: str) -> None:
    env = os.environ | {"FLASH_ATTENTION_ARCH": architecture, "CUTE_DSL_ARCH": f"{architecture}a"}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "200 8 128 torch.bfloat16 200 8 torch.float32"
