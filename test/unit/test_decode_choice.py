"""Which kernel decodes, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import LayerCache, Windows
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.cuda import pair
from oscar_kernels.errors import KernelError
from oscar_kernels.extend_plan import SHORT_BATCH
from oscar_kernels.layout import RowLayout
from oscar_kernels.parts import Part
from oscar_kernels.prepared import split_matrix
from oscar_kernels.triton import decode as triton
from sglang_oscar.attention import decode_choice
from sglang_oscar.errors import Int2Error


def cache_of(bits: int) -> LayerCache:
    """A layer that holds nothing."""
    layout, nothing = RowLayout(8, 128, 128, bits=bits), torch.empty(0)
    return LayerCache(layout, layout, Windows(64, 256, 320), *[nothing] * 6)


CACHE, EXACT = cache_of(2), cache_of(16)
VARIANT_OF = cuda.variant_of


def task(setting: str = "auto", caches: Sequence[LayerCache] = (CACHE,), q_heads: int = 32, **more: Any) -> Any:
    return decode_choice.DecodeTask(setting, caches, 64, q_heads, torch.bfloat16, **more)  # type: ignore[arg-type]


def choose(setting: str, max_batch: int = 65, **more: Any) -> Any:
    return decode_choice.choose(task(setting, **more), max_batch)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that runs the CUDA kernel; requests and drafts are floats of a workspace."""
    monkeypatch.setattr(cuda, "unsupported", lambda cache, *args: "rows of 16 bits" if cache.exact else None)
    monkeypatch.setattr(cuda, "variant_of", lambda *args, **more: None)
    monkeypatch.setattr(cuda, "compile_together", lambda jobs: None)
    monkeypatch.setattr(cuda, "prepare", lambda variant: None)
    monkeypatch.setattr(cuda, "workspace_numel", lambda cache, q_heads, batch, drafts: cuda.MAX_BATCH + batch + drafts)


@pytest.mark.usefixtures("hopper")
def test_choice_on_hopper() -> None:
    for setting in ("auto", "cuda"):
        assert isinstance(choose(setting), decode_choice.CudaDecode)
    assert isinstance(choose("triton"), decode_choice.TritonDecode)


@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_cannot_be_built_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(variant: object) -> None:
        raise KernelError("decode.cu does not compile: no")

    monkeypatch.setattr(cuda, "prepare", prepare)
    for setting in ("auto", "cuda"):
        with pytest.raises(Int2Error, match=r"^decode\.cu does not compile: no; or set .*DECODE_BACKEND=triton$"):
            choose(setting)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("max_batch", "short_chunks", "drafts", "largest"),
    [(65, False, 0, 65), (65, True, 0, SHORT_BATCH), (300, True, 0, 300), (300, True, 4, 304)],
)
def test_a_workspace_has_room_for_each_of_its_uses(
    max_batch: int, short_chunks: bool, drafts: int, largest: int
) -> None:
    assert (
        choose("auto", max_batch, short_chunks=short_chunks, drafts=drafts)._workspace.numel()
        == cuda.MAX_BATCH + largest
    )


def test_elsewhere_triton_decodes_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(choose("auto"), decode_choice.TritonDecode)
    assert "Triton kernel, because the GPU is not of compute capability 9.0" in caplog.text
    with pytest.raises(Int2Error, match=r"DECODE_BACKEND=cuda: the GPU is not .*; set it to auto or triton"):
        choose("cuda")


@pytest.mark.usefixtures("hopper")
def test_layers_that_are_left_exact_are_read_by_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside layers with codes, which keep the CUDA kernel, and behind its counters; else Triton decodes all."""
    with caplog.at_level(logging.INFO):
        decode = choose("auto", caches=[EXACT, CACHE])
    assert "CUDA kernel, Triton kernel in layers with keys or values of 16 bits" in caplog.text
    monkeypatch.setattr(triton, "decode", lambda cache, *args, workspace, **more: ("triton", cache, workspace.numel()))
    monkeypatch.setattr(cuda, "decode", lambda cache, *args, workspace, **more: ("cuda", cache))
    tables: Any = SimpleNamespace()
    q, needed = torch.empty(0), triton.workspace_numel(EXACT, 32, 65)
    assert decode(EXACT, tables, q, 1.0) == ("triton", EXACT, needed)
    assert decode(CACHE, tables, q, 1.0) == ("cuda", CACHE)
    alone = choose("auto", caches=[EXACT])
    assert alone(EXACT, tables, q, 1.0) == ("triton", EXACT, needed)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("short_chunks", [False, True])
@pytest.mark.parametrize("sink_logits", [False, True])
def test_what_a_server_launches_is_compiled_at_its_start(
    short_chunks: bool, sink_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps multiply outputs, and write log-sum-exps for sink logits; prefixes of short chunks are merged first."""
    compiled: set[tuple[bool, int]] = set()
    monkeypatch.setattr(cuda, "variant_of", VARIANT_OF)
    monkeypatch.setattr(cuda, "prepare", lambda variant: compiled.add((variant.lse, variant.reading_terms)))
    reading = split_matrix(torch.eye(128), torch.bfloat16)
    choose("auto", short_chunks=short_chunks, sink_logits=sink_logits, readings=[reading])
    merged = {(True, 0), (sink_logits, 0)} if short_chunks else set()
    assert compiled == {(sink_logits, cuda.READING_TERMS), *merged}


@pytest.mark.usefixtures("hopper")
def test_two_parts_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launch is compiled at the start, of decode and of verification, and each has a half of the workspace."""
    prepared: list[tuple[int, ...]] = []
    half = replace(CACHE, k_layout=RowLayout(4, 128, 128), v_layout=RowLayout(4, 128, 128))
    halves = [replace(half, k_layout=RowLayout(4, 128, 128, bits=bits)) for bits in (3, 2)]
    monkeypatch.setattr(cuda, "variant_of", VARIANT_OF)
    monkeypatch.setattr(
        pair, "prepare", lambda *of: prepared.append((*(x.key.bits for x in of[:2]), of[0].gqa, of[0].drafts))
    )
    own = task(caches=halves, kv_heads=8, pairs=[[(cache, None) for cache in halves]], drafts=4)
    decode = decode_choice.choose(own, 65)
    decode_choice.prepare_verify(decode, own, 65)
    assert prepared == [(3, 2, 4, 0), (3, 2, 4, 4)]
    numel = own.workspace_numel(65)
    assert numel == 2 * (-(-(cuda.MAX_BATCH + 69) // 128) * 128)
    calls: list[list[torch.Tensor]] = []
    monkeypatch.setattr(pair, "attend", lambda parts, tables, visible, scale, workspaces: calls.append([*workspaces]))
    tables: Any = None
    decode.attend([Part(cache, torch.empty(0)) for cache in halves], tables, None, 1.0)
    ((first, second),) = calls
    assert first.numel() == second.numel() == numel // 2
    assert second.data_ptr() == first.data_ptr() + first.nbytes


def test_a_cpu_has_no_choice() -> None:
    decode_choice.check("auto", "cpu")
    for setting in ("cuda", "triton"):
        with pytest.raises(Int2Error, match=f"DECODE_BACKEND={setting} needs --device cuda"):
            decode_choice.check(setting, "cpu")  # type: ignore[arg-type]


def prepare_verify(decode: Any, q_heads: int = 32, requests: int = 65, drafts: int = 4) -> None:
    decode_choice.prepare_verify(decode, task(q_heads=q_heads, drafts=drafts), requests)


@pytest.mark.usefixtures("hopper")
def test_what_decodes_verifies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The CUDA kernel, for every request times its passes, or the Triton kernel; each with the workspace of decode."""
    by_cuda, by_triton = choose("auto"), choose("triton")
    monkeypatch.setattr(cuda, "variant_of", lambda *args, **more: SimpleNamespace(passes=2))
    with caplog.at_level(logging.INFO):
        prepare_verify(by_cuda)
        prepare_verify(by_triton)
    assert "CUDA kernel, 4 tokens of a request in 2 passes" in caplog.text
    assert "int2 verification: Triton kernel" in caplog.text


@pytest.mark.parametrize(
    ("q_heads", "requests", "drafts", "fits"),
    [(64, 48, 4, True), (64, 256, 16, True), (128, 256, 64, False), (96, 256, 52, False), (64, 512, 64, False),
     (128, 48, 64, True)],
)  # fmt: skip
def test_a_verification_that_no_grid_holds_is_one_line(q_heads: int, requests: int, drafts: int, fits: bool) -> None:
    decode = decode_choice.TritonDecode(torch.empty(0))
    if fits:
        prepare_verify(decode, q_heads, requests, drafts)
        assert triton.partials_of(CACHE, q_heads, requests, 300, drafts) < 65_536
        return
    with pytest.raises(Int2Error, match=r"^the Triton kernel takes .* lower --max-running-requests or --speculative-"):
        prepare_verify(decode, q_heads, requests, drafts)


@pytest.mark.usefixtures("hopper")
def test_a_cuda_kernel_that_cannot_verify_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = choose("cuda")
    monkeypatch.setattr(cuda, "unsupported", lambda *args: "too many requests")
    with pytest.raises(Int2Error, match=r"^too many requests; set .*DECODE_BACKEND=triton, or drop --speculative-"):
        prepare_verify(decode)
