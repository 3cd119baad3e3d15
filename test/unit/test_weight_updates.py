"""Weights do not leave a server that may have absorbed the value rotation, nor come in formats that pass by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_loader import loader

from sglang_oscar import absorption, runtime, weight_updates
from sglang_oscar.errors import Int2Error


@pytest.fixture
def dtype(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Server arguments of this process."""
    args = SimpleNamespace(kv_cache_dtype="int2", load_format="sharded_state")
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    return args


def original(*args: Any) -> str:
    return "done"


def test_exports(dtype: SimpleNamespace) -> None:
    with pytest.raises(Int2Error, match="does not hand out weights"):
        weight_updates.around_save_weights(original, None, {"path": "x"})
    assert weight_updates.around_send_weights(original, None, None) == (False, weight_updates.NOT_EXPORTED)
    dtype.kv_cache_dtype = "auto"
    assert weight_updates.around_save_weights(original, None, {"path": "x"}) == "done"
    assert weight_updates.around_send_weights(original, None, None) == "done"


def runner(args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, online: bool, obstacle: str | None) -> Any:
    """A model runner whose weights can, or cannot, absorb, in a server that rotates online, or does not."""
    layer = SimpleNamespace(v_rotation=torch.eye(2) if online else None)
    settings = SimpleNamespace(absorb_v_rotation=True, v_rotation="hadamard")
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(settings=settings, layers=[layer]))
    monkeypatch.setattr(absorption, "obstacle", lambda model, layers: obstacle)
    monkeypatch.setattr(absorption, "attention_layers", lambda model: [])
    monkeypatch.setattr(loader, "get_model_loader", lambda config, model: loader.DefaultModelLoader(config))
    return SimpleNamespace(model=None, model_config=None, server_args=args)


@pytest.mark.parametrize(
    ("online", "obstacle", "expected"),
    [
        (True, None, "--load-format sharded_state have not absorbed"),
        (True, "projections are quantized", None),
        (False, None, None),
    ],
)
def test_weights_that_would_absorb_where_values_are_rotated(
    online: bool, obstacle: str | None, expected: str | None, dtype: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = weight_updates.reload_obstacle(runner(dtype, monkeypatch, online, obstacle), "auto")
    assert reason is None if expected is None else expected in str(reason)
