"""Which kernel decodes, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.errors import KernelError
from oscar_kernels.extend_plan import SHORT_BATCH
from oscar_kernels.triton import decode as triton
from sglang_oscar.attention import decode_choice
from sglang_oscar.errors import Int2Error

CACHE = SimpleNamespace(k_rows=torch.empty(0), exact=False, kv_heads=8, windows=Windows(64, 256, 320))
EXACT = SimpleNamespace(k_rows=torch.empty(0), exact=True)


def choose(setting: str, max_batch: int = 65, short_chunks: bool = False) -> object:
    return decode_choice.choose(setting, [CACHE], 64, 32, torch.bfloat16, max_batch, short_chunks)  # type: ignore[arg-type]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Variants that are prepared (their last argument) and the batches of workspaces that are made."""
    made: list[object] = []
    monkeypatch.setattr(cuda, "unsupported", lambda *args: None)
    monkeypatch.setattr(cuda, "variant_of", lambda *args: args[-1])
    monkeypatch.setattr(cuda, "prepare", made.append)
    monkeypatch.setattr(cuda, "make_workspace", lambda cache, q_heads, batch: made.append(batch) or torch.empty(batch))
    return made


@pytest.mark.usefixtures("hopper")
def test_choice_on_hopper() -> None:
    for setting in ("auto", "cuda"):
        assert isinstance(choose(setting), decode_choice.CudaDecode)
    assert choose("triton") is triton.decode


@pytest.mark.usefixtures("hopper")
def test_a_kernel_that_cannot_be_built_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(variant: object) -> None:
        raise KernelError("decode.cu does not compile: no")

    monkeypatch.setattr(cuda, "prepare", prepare)
    for setting in ("auto", "cuda"):
        with pytest.raises(Int2Error, match=r"^decode\.cu does not compile: no; or set .*DECODE_BACKEND=triton$"):
            choose(setting)


def test_short_chunks_need_log_sum_exps_and_room(hopper: list[object]) -> None:
    choose("auto", 65)
    assert hopper == [False, 65]
    hopper.clear()
    choose("auto", 65, short_chunks=True)
    choose("auto", 300, short_chunks=True)
    assert hopper == [False, True, SHORT_BATCH, False, True, 300]


def test_elsewhere_triton_decodes_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("auto") is triton.decode
    assert "Triton kernel, because the GPU is not of compute capability 9.0" in caplog.text
    with pytest.raises(Int2Error, match=r"DECODE_BACKEND=cuda: the GPU is not .*; set it to auto or triton"):
        choose("cuda")


def test_layers_that_are_left_exact_are_read_by_triton(
    hopper: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside layers with codes, which keep the CUDA kernel; where there are no others, Triton decodes."""
    with caplog.at_level(logging.INFO):
        decode: Any = decode_choice.choose("auto", [EXACT, CACHE], 64, 32, torch.bfloat16, 65, False)  # type: ignore[list-item]
    assert hopper == [False, 65]
    assert "CUDA kernel, Triton kernel in layers with keys or values of 16 bits" in caplog.text
    monkeypatch.setattr(decode_choice.triton, "decode", lambda cache, *args, lse: ("triton", cache))
    monkeypatch.setattr(cuda, "decode", lambda cache, *args, workspace, lse: ("cuda", cache))
    tables, q = SimpleNamespace(), torch.empty(0)
    assert decode(EXACT, tables, q, 1.0) == ("triton", EXACT)
    assert decode(CACHE, tables, q, 1.0) == ("cuda", CACHE)
    monkeypatch.setattr(cuda, "unsupported", lambda *args: "the CUDA kernel does not support keys or values of 16 bits")
    alone: Any = decode_choice.choose("auto", [EXACT], 64, 32, torch.bfloat16, 65, False)  # type: ignore[list-item]
    assert alone is decode_choice.triton.decode


def test_a_cpu_has_no_choice() -> None:
    decode_choice.check("auto", "cpu")
    for setting in ("cuda", "triton"):
        with pytest.raises(Int2Error, match=f"DECODE_BACKEND={setting} needs --device cuda"):
            decode_choice.check(setting, "cpu")  # type: ignore[arg-type]


def choose_verify(decode: object) -> object:
    return decode_choice.choose_verify(decode, [CACHE], 64, 32, torch.bfloat16, 65, 4)  # type: ignore[arg-type]


def test_what_decodes_verifies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The CUDA kernel with a workspace of its own, for every request times its passes, or the Triton kernel."""
    made: list[object] = []
    monkeypatch.setattr(cuda, "unsupported", lambda *args: None)
    monkeypatch.setattr(cuda, "variant_of", lambda *args, drafts=0: SimpleNamespace(passes=2, drafts=drafts))
    monkeypatch.setattr(cuda, "prepare", lambda variant: made.append(variant.drafts))
    monkeypatch.setattr(cuda, "make_workspace", lambda *args: made.append(args[2:]) or torch.empty(1))
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_verify(decode_choice.CudaDecode([CACHE], 32, 65)), decode_choice.CudaVerify)  # type: ignore[list-item]
        assert choose_verify(triton.decode) is triton.verify
    assert made == [(65,), 4, (65, 4)]
    assert "CUDA kernel, 4 tokens of a request in 2 passes" in caplog.text
    assert "int2 verification: Triton kernel" in caplog.text


@pytest.mark.parametrize(
    ("q_heads", "requests", "drafts", "fits"),
    [(64, 48, 4, True), (64, 256, 16, True), (128, 256, 64, False), (96, 256, 52, False), (64, 512, 64, False),
     (128, 48, 64, True)],
)  # fmt: skip
def test_a_verification_that_no_grid_holds_is_one_line(q_heads: int, requests: int, drafts: int, fits: bool) -> None:
    def chosen() -> object:
        return decode_choice.choose_verify(triton.decode, [CACHE], 64, q_heads, torch.bfloat16, requests, drafts)  # type: ignore[arg-type, list-item]

    if fits:
        assert chosen() is triton.verify
        assert triton.partials_of(CACHE, q_heads, requests, 300, drafts) < 65_536  # type: ignore[arg-type]
        return
    with pytest.raises(Int2Error, match=r"^the Triton kernel takes .* lower --max-running-requests or --speculative-"):
        chosen()


def test_a_cuda_kernel_that_cannot_verify_is_one_line(monkeypatch: pytest.MonkeyPatch, hopper: list[object]) -> None:
    decode = choose("cuda")
    monkeypatch.setattr(cuda, "unsupported", lambda *args: "too many requests")
    with pytest.raises(Int2Error, match=r"^too many requests; set .*DECODE_BACKEND=triton, or drop --speculative-"):
        choose_verify(decode)
