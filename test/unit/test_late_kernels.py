"""Kernels that are built while a server serves are counted and named: a planted one is, those before are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from oscar_kernels import builds
from oscar_kernels.cuda import jit
from sglang_oscar import metrics
from sglang_oscar.requests import late_kernels

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the metric counts; of listeners nothing is left."""
    names: list[str] = []
    monkeypatch.setattr(metrics, "count", names.append)
    monkeypatch.setattr(late_kernels, "_total", 0)
    monkeypatch.setattr(builds, "_listeners", [])
    monkeypatch.setattr(knobs.compilation, "listener", None)
    return names


def compile_kernel(module: str) -> None:
    """Compile a Triton kernel of a module for a GPU that is not there."""

    def planted(out_ptr):  # type: ignore[no-untyped-def]
        tl.store(out_ptr, 1.0)

    planted.__module__ = module
    # The decorator makes an interpreted function of it in tests.
    source = ASTSource(JITFunction(planted), signature={"out_ptr": "*fp32"}, constexprs={})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_a_late_triton_kernel_is_counted(counted: list[str], caplog: pytest.LogCaptureFixture) -> None:
    compile_kernel("oscar_kernels.triton.planted")
    assert counted == []
    late_kernels.begin(GPU)
    late_kernels.begin(GPU)
    with caplog.at_level(logging.WARNING):
        compile_kernel("oscar_kernels.triton.planted")
    assert counted == ["late_kernels"]
    (line,) = caplog.messages
    assert line.startswith("int2 kernel planted was built in ")
    assert line.endswith("s while requests waited (1 since the server began to serve)")


def test_kernels_of_others_are_theirs_and_their_listener_is_told(counted: list[str]) -> None:
    told: list[str] = []
    knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: told.append(src.name)
    late_kernels.begin(GPU)
    compile_kernel("sglang.srt.planted")
    assert (told, counted) == (["planted"], [])


def test_a_late_cuda_kernel_is_counted_once(
    counted: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        """Loads anything."""

        CUfunction = int
        CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0)

        def __getattr__(self, name: str) -> Any:
            return lambda *args: (0, 0)

    monkeypatch.setattr(jit, "_bindings", lambda module: Driver())
    monkeypatch.setattr(jit, "check", lambda result: result[1])
    monkeypatch.setattr(jit, "compile_source", lambda *given: b"")
    late_kernels.begin(GPU)
    for _ in range(2):
        jit.load("planted.cu", "planted", (), 0)
    assert counted == ["late_kernels"]
    assert caplog.messages[0].startswith("int2 kernel planted.cu was built in ")


def test_without_a_gpu_nobody_listens() -> None:
    late_kernels.begin(torch.device("cpu"))
    assert knobs.compilation.listener is None
