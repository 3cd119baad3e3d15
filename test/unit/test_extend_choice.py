"""Which backend extend gets, and that its memory is in the account."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from oscar_kernels.triton.decode import decode
from sglang_oscar.attention import extend_choice, flash_attention3
from sglang_oscar.attention.extend_choice import ExtendWorkspace, choose
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.plan import make_plan

WORKSPACE = ExtendWorkspace(
    1 << 16, 4096, 32, torch.bfloat16, "flashinfer", "fa2", 1 << 20, plan_bytes=8 << 20, passes=8
)


@pytest.mark.parametrize("installed", [False, True])
def test_choice_on_a_gpu(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert choose("auto", "cuda", 128, False) == ("flashinfer" if installed else "triton")
    assert choose("triton", "cuda", 128, False) == "triton"
    if installed:
        assert choose("flashinfer", "cuda", 128, False) == "flashinfer"
    else:
        with pytest.raises(Int2Error, match="not installed; pip install flashinfer-python"):
            choose("flashinfer", "cuda", 128, False)


def test_a_cpu_has_no_choice() -> None:
    assert choose("auto", "cpu", 128, False) is None
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
    ("gib", "tokens", "passes"), [(1, 8192, 8), (8, 65_536, 8), (20, 65_536, 9), (40, 65_536, 19), (100, 65_536, 32)]
)
def test_workspace_grows_with_the_budget(gib: int, tokens: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice 4 KiB of keys and values a token, at most 256 MiB or a 32nd; 8 MiB for each plan."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("flashinfer.utils.determine_attention_backend", lambda *args, **options: "fa3")
    layer = Geometry.uniform(RowLayout(8, 128, 128), Windows(0, 0, 0), torch.bfloat16, 1).any_layer
    made = extend_choice.workspace("flashinfer", layer, 32, torch.bfloat16, gib * GIB)
    assert (made.tokens, made.passes) == (tokens, passes)


def test_flash_attention_3_plans_in_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Geometry.uniform(RowLayout(8, 128, 128), Windows(0, 0, 0), torch.bfloat16, 1).any_layer
    made = extend_choice.workspace("fa3", layer, 32, torch.bfloat16, 100 * GIB)
    assert (made.tokens, made.passes, made.fixed_bytes()) == (65_536, 32, 65_536 * 4096)
    monkeypatch.setattr(flash_attention3, "missing", lambda head_dim: None if head_dim == 128 else "not that")
    assert choose("fa3", "cuda", 128, False) == "fa3"
    with pytest.raises(Int2Error, match="EXTEND_BACKEND=fa3, but not that; unset it"):
        choose("fa3", "cuda", 96, False)


@pytest.mark.parametrize(("capability", "taken"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_flash_attention_3_is_taken_unasked_on_hopper(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is compiled for the heads; elsewhere FlashInfer stays."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(flash_attention3, "installed", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose("auto", "cuda", 128, False) == ("fa3" if taken else "flashinfer")
    assert choose("auto", "cuda", 96, False) == "flashinfer"
    assert choose("auto", "cuda", 128, sink_logits=True) == "flashinfer"
    if taken:
        assert choose("fa3", "cuda", 128, sink_logits=True) == "fa3"
    assert choose("flashinfer", "cuda", 128, False) == "flashinfer"


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
        extend_choice.ragged_extend(WORKSPACE, geometry, torch.device("cpu"), decode)
    assert "\n" not in str(caught.value)


def test_a_full_gpu_is_no_fault_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def plan(self, *args: object, **options: object) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(extend_choice, "_kernels", lambda size, device: Full)
    geometry = Geometry.uniform(RowLayout(8, 128, 128), Windows(64, 256, 256), torch.bfloat16, 36)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
        extend_choice.ragged_extend(WORKSPACE, geometry, torch.device("cpu"), decode)
