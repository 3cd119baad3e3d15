"""Which kernel decodes, and what is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from oscar_kernels.cuda import decode as cuda
from oscar_kernels.triton import decode as triton
from sglang_oscar import decode_backend
from sglang_oscar.errors import Int2Error

CACHE = SimpleNamespace(k_rows=torch.empty(0))


def choose(setting: str) -> object:
    return decode_backend.choose(setting, CACHE, 64, 32, torch.bfloat16, 65)  # type: ignore[arg-type]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unsupported", lambda *args: None)
    monkeypatch.setattr(cuda, "variant_of", lambda *args: None)
    monkeypatch.setattr(cuda, "prepare", lambda variant: None)
    monkeypatch.setattr(cuda, "make_workspace", lambda *args: None)


@pytest.mark.usefixtures("hopper")
def test_choice_on_hopper() -> None:
    for setting in ("auto", "cuda"):
        assert isinstance(choose(setting), decode_backend.CudaDecode)
    assert choose("triton") is triton.decode


def test_elsewhere_triton_decodes_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("auto") is triton.decode
    assert "Triton kernel, because the GPU is not of compute capability 9.0" in caplog.text
    with pytest.raises(Int2Error, match=r"DECODE_BACKEND=cuda: the GPU is not .*; set it to auto or triton"):
        choose("cuda")


def test_a_cpu_has_no_choice() -> None:
    decode_backend.check("auto", "cpu")
    for setting in ("cuda", "triton"):
        with pytest.raises(Int2Error, match=f"DECODE_BACKEND={setting} needs --device cuda"):
            decode_backend.check(setting, "cpu")  # type: ignore[arg-type]
