"""Weights do not leave a server that may have absorbed the value rotation, nor come in formats that pass by it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_loader import loader

from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.transform import SideTransform
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.folding import absorption, updates
from sglang_oscar.features.tiers import hooks
from sglang_oscar.formats import origin


def original(*args: Any) -> str:
    return "done"


def test_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "active", SimpleNamespace)
    with pytest.raises(Int2Error, match="does not hand out weights"):
        updates.around_save_weights(original, None, {"path": "x"})
    assert updates.around_send_weights(original, None, None) == (False, updates.NOT_EXPORTED)
    monkeypatch.setattr(updates, "active", lambda: None)
    assert updates.around_save_weights(original, None, {"path": "x"}) == "done"
    assert updates.around_send_weights(original, None, None) == "done"


def state(online: bool) -> Any:
    """A server that rotates values at every step, or one whose weights have absorbed the rotation."""
    side = SideFormat(64, transform=SideTransform(torch.eye(64)))
    format = LayerFormat(1, 64, side, side)
    layer = SimpleNamespace(format=format if online else format.absorbed())
    return SimpleNamespace(settings=SimpleNamespace(absorb_v_rotation=True, v_rotation="hadamard"), layers={0: layer})


@pytest.mark.parametrize(
    ("online", "obstacle", "expected"),
    [
        (True, None, "--load-format sharded_state have not absorbed"),
        (True, "projections are quantized", None),
        (False, None, None),
    ],
)
def test_weights_that_would_absorb_where_values_are_rotated(
    online: bool, obstacle: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorption, "obstacle", lambda model, layers: obstacle)
    monkeypatch.setattr(absorption, "attention_layers", lambda model: [])
    monkeypatch.setattr(loader, "get_model_loader", lambda config, model: loader.DefaultModelLoader(config))
    runner = SimpleNamespace(model=None, model_config=None, server_args=SimpleNamespace(load_format="sharded_state"))
    reason = updates.reload_obstacle(state(online), runner, "auto")
    assert reason is None if expected is None else expected in str(reason)


@pytest.mark.parametrize("how", ["updated", "breaks off", "no files"])
def test_no_storage_behind_an_update(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys would say the old weights. Not behind one that breaks off either, but behind one that read nothing."""
    args = SimpleNamespace(kv_cache_dtype="int2")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    monkeypatch.setattr(absorption, "absorb", lambda *_: None)
    monkeypatch.setattr(absorption, "of_this_process", lambda: None)
    monkeypatch.setattr(origin, "_updated", threading.Event())
    monkeypatch.setattr(hooks, "active", SimpleNamespace)

    def update(*given: Any) -> tuple[bool, str]:
        if how == "no files":
            return False, "no such folder"
        model: Any = SimpleNamespace(load_weights=lambda weights: None)
        absorption.around_load_weights_and_postprocess(lambda one, *rest: one.load_weights(None), model, None, None)
        return how == "updated", "read"

    runner = SimpleNamespace(is_draft_worker=False, token_to_kv_pool=SimpleNamespace())
    updates.around_update_from_disk(update, SimpleNamespace(get_model_runner=lambda: runner), "path", "auto")
    expected = (AssertionError, "host tier") if how == "no files" else (Int2Error, "start a server on the new weights")
    with pytest.raises(expected[0], match=expected[1]):
        hooks.around_create_backend(original, None, "file", SimpleNamespace(), SimpleNamespace())
