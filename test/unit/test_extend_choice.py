"""Which backend extend gets, and that its memory is in the account."""

from __future__ import annotations

import ast
import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.prefix import copy_prefixes
from oscar_tools.bench.synthetic import shuffled_tables
from sglang_oscar.attention import extend_choice, flash_attention4, stock_check
from sglang_oscar.attention.extend_choice import ExtendWorkspace, choose
from sglang_oscar.attention.flash_attention3 import FlashAttention3
from sglang_oscar.attention.flash_attention4 import FlashAttention4
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.plan import make_plan

WORKSPACE = ExtendWorkspace(
    1 << 16, 4096, 32, torch.bfloat16, "flashinfer", "fa2", 1 << 20, plan_bytes=8 << 20, passes=8
)


@pytest.mark.parametrize("installed", [False, True])
def test_choice_on_a_gpu(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert choose("auto", "cuda", (128, 128), False) == ("flashinfer" if installed else "triton")
    assert choose("triton", "cuda", (128, 128), False) == "triton"
    if installed:
        assert choose("flashinfer", "cuda", (128, 128), False) == "flashinfer"
    else:
        with pytest.raises(Int2Error, match="not installed; pip install flashinfer-python"):
            choose("flashinfer", "cuda", (128, 128), False)


def test_a_cpu_has_no_choice() -> None:
    assert choose("auto", "cpu", (128, 128), False) is None
    for setting in ("triton", "flashinfer", "fa3"):
        with pytest.raises(Int2Error, match=f"{extend_choice.VARIABLE}={setting} needs --device cuda"):
            choose(setting, "cpu", 128, False)


def test_workspace_is_in_the_account() -> None:
    geometry = Geometry.uniform(RowLayout(8, 128, 128), Windows(64, 256, 256), torch.bfloat16, layers=36)
    plain, plan = (make_plan(geometry, 40 * GIB, 64, 64, parts) for parts in ([], [WORKSPACE]))
    assert plan.fixed_bytes == plain.fixed_bytes + WORKSPACE.fixed_bytes()
    assert WORKSPACE.fixed_bytes() > 256 << 20
    assert [line for line in plan.lines(1000) if line not in plain.lines(1000)] == WORKSPACE.lines(plan, 1000)
    assert "65536 tokens at a time" in plan.lines(1000)[-1]


@pytest.mark.parametrize(
    ("gib", "tokens", "passes"), [(1, 8192, 8), (8, 65_536, 8), (20, 131_072, 9), (40, 131_072, 19), (100, 131_072, 32)]
)
def test_workspace_grows_with_the_budget(gib: int, tokens: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice 4 KiB of keys and values a token, at most 512 MiB or a 32nd; 8 MiB for each plan."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("flashinfer.utils.determine_attention_backend", lambda *args, **options: "fa3")
    layer = Geometry.uniform(RowLayout(8, 128, 128), Windows(0, 0, 0), torch.bfloat16, 1).any_layer
    made = extend_choice.workspace("flashinfer", layer, 32, torch.bfloat16, gib * GIB)
    assert (made.tokens, made.passes) == (tokens, passes)


def test_flash_attention_3_plans_in_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Geometry.uniform(RowLayout(8, 128, 128), Windows(0, 0, 0), torch.bfloat16, 1).any_layer
    made = extend_choice.workspace("fa3", layer, 32, torch.bfloat16, 100 * GIB)
    assert (made.kernel, made.kernels) == ("FlashAttention-3", "fa3")
    assert (made.tokens, made.passes, made.fixed_bytes()) == (131_072, 32, 131_072 * 4096)
    monkeypatch.setattr(FlashAttention3, "missing", lambda *heads: None if heads == (128, 128) else "not that")
    assert choose("fa3", "cuda", (128, 128), False) == "fa3"
    with pytest.raises(Int2Error, match="EXTEND_BACKEND=fa3, but not that; unset it"):
        choose("fa3", "cuda", (96, 96), False)


CARDS = [
    ((8, 0), "fa3", "fa3"), ((8, 6), "fa3", "fa3"), ((8, 9), "fa3", "fa3"), ((9, 0), "fa3", "fa3"),
    ((10, 0), "fa4", "flashinfer"), ((10, 3), "fa4", "flashinfer"), ((11, 0), "flashinfer", "flashinfer"),
    ((12, 0), "fa4", "flashinfer"), ((12, 1), "fa4", "flashinfer"),
]  # fmt: skip
"""Compute capability, and what prompts take unasked with head_dim 128 and with 256."""


@pytest.mark.parametrize(("capability", "with_128", "with_256"), CARDS)
def test_what_sglang_brings_for_the_card(
    capability: tuple[int, int], with_128: str, with_256: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sink logits, other heads, and what is asked for, are FlashInfer's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for version in (FlashAttention3, FlashAttention4):
        monkeypatch.setattr(version, "installed", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose("auto", "cuda", (128, 128), False) == with_128
    assert choose("auto", "cuda", (256, 256), False) == with_256
    assert choose("auto", "cuda", (96, 96), False) == "flashinfer"
    assert choose("auto", "cuda", (192, 128), False) == with_128
    assert choose("auto", "cuda", (192, 192), False) == "flashinfer"
    assert choose("auto", "cuda", (128, 128), sink_logits=True) == "flashinfer"
    assert choose("flashinfer", "cuda", (128, 128), False) == "flashinfer"
    if with_128 != "flashinfer":
        assert choose(with_128, "cuda", (128, 128), sink_logits=True) == with_128
        assert extend_choice.why_not_flash("auto", (128, 128), False) is None
    other = "fa3" if with_128 == "fa4" else "fa4"
    with pytest.raises(Int2Error, match=f"{extend_choice.VARIABLE}={other}, but it is .*; unset it"):
        choose(other, "cuda", (128, 128), False)
    assert extend_choice.why_not_flash("auto", (128, 128), True) == "the model has sink logits"
    assert extend_choice.why_not_flash("triton", (128, 128), False) == f"{extend_choice.VARIABLE}=triton"
    assert "head_dim 96" in str(extend_choice.why_not_flash("auto", (96, 96), False)) or with_128 == "flashinfer"


@pytest.mark.parametrize("version", [FlashAttention3, FlashAttention4])
def test_why_a_version_cannot_be_had(version: type[FlashAttention3], monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU comes before what is installed, which would not help; heads may differ in size."""
    monkeypatch.setattr(version, "installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (11, 0))
    assert version.missing(128) == "it is not for this GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (version.capabilities[0], 0))
    assert version.missing(128) == f"{version.needs} is not installed"
    monkeypatch.setattr(version, "installed", lambda: True)
    assert version.missing(192) == "it does not take head_dim 192"
    assert version.missing(128, 192) == "it does not take head_dim 128 and 192"
    assert version.missing(192, 128) is None


def test_the_newer_version_is_looked_for_in_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function takes what it is called with; what compiles it may be missing."""
    assert FlashAttention4.installed()
    source = Path(sglang.__path__[0]) / flash_attention4.SOURCE
    functions = {
        node.name: node.args for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)
    }
    names = {argument.arg for argument in functions["flash_attn_varlen_func"].args}
    lengths = {f"{what}_seqlen{s}_{side}" for what, s in (("cu", "s"), ("max", "")) for side in "qk"}
    assert {"q", "k", "v", "softmax_scale", "causal", "return_softmax_lse", *lengths} <= names
    monkeypatch.setattr(flash_attention4, "PACKAGES", ("no_such_package",))
    assert "quack-kernels) is not installed" in str(FlashAttention4.missing(128))


class Torch:
    """Attention as a stock kernel gives it, in torch; ``off`` is added to outputs, ``empty`` is the sum of no keys."""

    def __init__(self, off: float = 0.0, empty: float = -math.inf) -> None:
        self.off, self.empty = off, empty

    def plan(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *sizes: int, **options: object) -> None:
        self.starts = qo_indptr.tolist(), kv_indptr.tolist()

    def forward_return_lse(self, q: Any, k: Any, v: Any, causal: bool, sm_scale: float) -> tuple[Any, Any]:
        out, sums = stock_check.expected(q, k, v, *self.starts, causal, sm_scale)
        return (out.nan_to_num(0) + self.off).to(q.dtype), sums.float().masked_fill(sums.isinf(), self.empty)

    def forward(self, *vectors: Any, **options: Any) -> Any:
        return self.forward_return_lse(*vectors, **options)[0]


def test_a_kernel_that_is_wrong_is_found() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    assert stock_check.differs(Torch, 4, (2, 64, 64), like) is None
    assert stock_check.differs(Torch, 4, (2, 192, 128), like) is None
    assert "differ by 0.2 " in str(stock_check.differs(lambda: Torch(0.2), 4, (2, 64, 64), like))
    assert "no keys" in str(stock_check.differs(lambda: Torch(empty=math.inf), 4, (2, 64, 64), like))
    assert "differ by inf" in str(stock_check.differs(lambda: Torch(float("nan")), 4, (2, 64, 64), like))


def test_what_is_expected_is_attention() -> None:
    """New tokens at the ends of keys see those before them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, heads, 64, generator=generator) for n, heads in ((5, 4), (9, 2), (9, 2)))
    out, sums = stock_check.expected(q, k, v, [0, 2, 5], [0, 4, 9], True, 0.1)
    for token, (begin, end) in enumerate([(0, 3), (0, 4), (4, 7), (4, 8), (4, 9)]):
        for head in range(4):
            logits = (q[token, head].double() @ k[begin:end, head // 2].double().T) * 0.1
            torch.testing.assert_close(out[token, head], logits.softmax(-1) @ v[begin:end, head // 2].double())
            torch.testing.assert_close(sums[token, head], logits.exp().sum().log2())


def test_a_budget_below_windows_and_workspace_is_refused() -> None:
    geometry = Geometry.uniform(RowLayout(1, 64, 64), Windows(0, 0, 0), torch.bfloat16, layers=1)
    with pytest.raises(Int2Error, match="too small"):
        make_plan(geometry, WORKSPACE.fixed_bytes(), 1, 64, [WORKSPACE])


def test_a_kernel_that_cannot_be_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def plan(self, *args: object, **options: object) -> None:
            raise RuntimeError("Could not find nvcc\nand more")

    monkeypatch.setattr(extend_choice, "_kernels", lambda size, device: Broken)
    geometry = Geometry.uniform(RowLayout(8, 128, 128), Windows(64, 256, 256), torch.bfloat16, 36)
    with pytest.raises(Int2Error, match=r"\(Could not find nvcc\); .*SGLANG_OSCAR_EXTEND_BACKEND=triton") as caught:
        extend_choice.ragged_extend(WORKSPACE, geometry, torch.device("cpu"), decode, copy_prefixes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "kernels", "ours"),
    [("fa3", "fa3", False), ("fa4", "fa4", True), ("flashinfer", "fa3", True), ("flashinfer", "fa2", False)],
)
def test_long_prefixes_are_cut_where_the_kernel_does_not(
    backend: Any, kernels: Any, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else 128 tokens behind 20,000 would leave most of a GPU idle; what the kernel cuts is joined whole."""

    class Idle:
        def plan(self, *args: object, **options: object) -> None: ...

        def forward_return_lse(self, *args: object, **options: object) -> None: ...

    monkeypatch.setattr(extend_choice, "_kernels", lambda size, device: Idle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    geometry = Geometry.uniform(RowLayout(1, 128, 128), Windows(64, 256, 256), torch.bfloat16, 1)
    size = replace(WORKSPACE, tokens=32_000, token_bytes=512, q_heads=4, backend=backend, kernels=kernels)
    planner = extend_choice.ragged_extend(size, geometry, torch.device("cpu"), decode, copy_prefixes).planner
    tables, _ = shuffled_tables([20_000], 64)
    plan = planner.plan(tables, [20_000], [128])
    assert (plan.joined is None) == ours
    assert [load.splits > 1 for load in plan.passes] == [True] * ours


def test_a_full_gpu_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def plan(self, *args: object, **options: object) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(extend_choice, "_kernels", lambda size, device: Full)
    geometry = Geometry.uniform(RowLayout(8, 128, 128), Windows(64, 256, 256), torch.bfloat16, 36)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
        extend_choice.ragged_extend(WORKSPACE, geometry, torch.device("cpu"), decode, copy_prefixes)
