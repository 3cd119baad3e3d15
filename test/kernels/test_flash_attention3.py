"""Extend through FlashAttention-3: on a GPU the real one, elsewhere torch in the shape of its interface."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_ragged_extend
import torch
from kernel_cases import Shape
from test_extend import Case, make
from test_ragged_extend import JOINED, LIMITS, SHAPES, TorchRagged

from oscar_kernels import extend_plan
from oscar_kernels.cache import Windows
from oscar_kernels.extend_plan import Limits
from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.finite import make_values_finite_
from sglang_oscar.attention.flash_attention3 import FlashAttention3


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """``flash_attn_varlen_func`` of both versions in torch: natural logarithms, heads first."""
    assert options["num_splits"] == 0, "few queries on many keys would leave most of a GPU idle"
    starts, kv_starts = options["cu_seqlens_q"], options["cu_seqlens_k"]
    assert starts.dtype == kv_starts.dtype == torch.int32
    longest = [options["max_seqlen_q"], options["max_seqlen_k"]]
    assert longest == [int((x[1:] - x[:-1]).max()) for x in (starts, kv_starts)]
    kernel = TorchRagged()
    heads, planned = (q.shape[1], *k.shape[1:]), {"causal": options["causal"], "q_data_type": q.dtype}
    kernel.plan(starts.cpu(), kv_starts.cpu(), *heads, head_dim_vo=v.shape[2], **planned)
    out, lse = kernel.forward_return_lse(q, k, v, options["causal"], options["softmax_scale"])
    # Where the sum is NaN, the kernels say what they say of no keys.
    lse = (lse * math.log(2)).T.nan_to_num(-math.inf, math.inf, -math.inf).contiguous()
    return (out, lse) if options.get("return_softmax_lse") else out


@pytest.fixture
def _kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        if (reason := FlashAttention3.missing(128)) is not None:
            pytest.skip(reason)
        return
    module = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)


def check(case: Case, device: torch.device, limits: Limits = LIMITS) -> None:
    test_ragged_extend.check(case, device, limits, attention=lambda: FlashAttention3(device))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_prefixes_and_chunks_at_once(shape: Shape, device: torch.device) -> None:
    check(make(shape, [0, 1, 30, 150, 70], [5, 64, 3, 66, 0], device), device, JOINED)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_chunks_and_passes(shape: Shape, device: torch.device) -> None:
    """Several passes, one that ends within a request, a short chunk, requests without prefix between them."""
    check(make(shape, [0, 1, 30, 150, 70], [70, 64, 3, 66, 0], device), device)


@pytest.mark.usefixtures("_kernel")
def test_cut_keys_and_no_prefix(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without keys among those of a pass, and a piece that is empty."""
    monkeypatch.setattr(extend_plan, "MIN_PIECE", 16)
    check(make(Shape(), [150, 0, 3, 90], [64, 70, 64, 65], device), device, replace(LIMITS, capacity=1000))
    check(make(Shape(), [0, 0], [70, 1], device), device)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("limits", [LIMITS, JOINED], ids=["apart", "joined"])
def test_a_value_that_is_no_number_stays_with_its_request(limits: Limits, device: torch.device) -> None:
    """Its rows follow those of another one, and tiles of keys reach across."""
    case = make(Shape(gqa=2, kv_heads=2, head_dim=128, group=128), [100, 70], [3, 2], device)

    def run() -> torch.Tensor:
        make_values_finite_(case.k, case.v)
        return test_ragged_extend.run(case, limits, device, 0.1, decode, lambda: FlashAttention3(device))

    clean = run()
    case.v[3:] = float("nan")
    out = run()
    assert torch.equal(out[:3], clean[:3])
    assert out[3:].isnan().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("head_dim", [128, 256])
def test_at_size(head_dim: int, device: torch.device) -> None:
    shape = Shape(gqa=4, kv_heads=4, head_dim=head_dim, group=128, windows=Windows(64, 256, 256), page_size=64)
    limits = Limits(8192, 8, 32, 2240)
    check(make(shape, [0, 20_000, 3000, 4000, 1], [3000, 256, 1000, 10, 64], device), device, limits)


@pytest.mark.usefixtures("_kernel")
def test_sums_are_of_the_interface(device: torch.device) -> None:
    """Base-2 logarithms, a row for every token, contiguous; -inf for no keys."""
    kernel = FlashAttention3(device)
    kernel.plan(torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 4, 4], dtype=torch.int32), 4, 2, 64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, generator=generator).bfloat16().to(device) for shape in ((5, 4, 64), (4, 2, 64), (4, 2, 64))
    )
    out, lse = kernel.forward_return_lse(q, k, v, causal=False, sm_scale=0.1)
    logits = torch.einsum("qhd,khd->qhk", q[:3].double(), k.double().repeat_interleave(2, 1)) * 0.1
    wanted = logits.logsumexp(-1) / math.log(2)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((5, 4), torch.float32, True)
    torch.testing.assert_close(lse[:3].double(), wanted, rtol=1e-3, atol=1e-3)
    assert (lse[3:] == float("-inf")).all()
    assert torch.equal(out, kernel.forward(q, k, v, causal=False, sm_scale=0.1))


def test_why_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(FlashAttention3.missing(128))
    spec = importlib.machinery.ModuleSpec("sgl_kernel", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "not installed" in str(FlashAttention3.missing(128))
    (tmp_path / "flash_ops.abi3.so").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert FlashAttention3.missing(128) is None
    assert "head_dim 96" in str(FlashAttention3.missing(96))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "not for this GPU" in str(FlashAttention3.missing(128))
    assert FlashAttention3.capabilities == (8, 9)
