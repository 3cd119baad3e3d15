"""Baselines of the decode benchmark: chosen by name, and refused by name where they are not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oscar_tools.bench import decode_baselines, fa3_baseline


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no baseline 'fa9': there are flashinfer, "):
        decode_baselines.chosen("torch,fa9")


def test_the_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_baselines, "installed", lambda name: True)
    assert decode_baselines.chosen("fa3_fp8,torch,flashinfer") == ["fa3_fp8", "torch", "flashinfer"]


def test_flash_attention_is_looked_for_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package without the library of FlashAttention-3 has all of its Python; neither is imported to find out."""
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="baseline fa3_fp8: sgl_kernel with flash_ops is not installed"):
        decode_baselines.chosen("torch,fa3_fp8")
    (package / "flash_ops.abi3.so").touch()
    assert fa3_baseline.available()
    assert decode_baselines.chosen("fa3") == ["fa3"]


def test_xqa_is_looked_for_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Older releases of FlashInfer have none."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(ValueError, match="baseline xqa_fp8: flashinfer with xqa is not installed"):
        decode_baselines.chosen("xqa_fp8")
    (package / "xqa.py").touch()
    assert decode_baselines.chosen("xqa_fp8,xqa") == ["xqa_fp8", "xqa"]
