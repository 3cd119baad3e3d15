"""Errors of keys on traffic: what is measured, how often, and when a layer's has doubled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from oscar_kernels import reference
from oscar_kernels.cache import LayerCache, StoreSlots, Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.transform import SideTransform
from sglang_oscar import metrics
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.key_errors import CHUNKS, EVERY, LEAST, KeyErrors
from sglang_oscar.memory.layer import CachedLayer

HEADS, D, TOKENS, SLOTS = 2, 64, 200, 512
CODED, EXACT, FINER = 3, 5, 7
BITS = {CODED: 2, EXACT: 16, FINER: 4}


@pytest.fixture(autouse=True)
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Metrics of this test alone, and nothing that others wait to say."""
    monkeypatch.setattr(metrics, "_early", None)
    metrics.use_labels({"model_name": "m"})
    yield
    for metric in metrics._metrics.values():
        REGISTRY.unregister(metric)
    metrics._metrics.clear()
    metrics._said.clear()
    metrics.use_labels(None)


def value(name: str, layer: int) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:oscar_{name}", {"model_name": "m", "layer": str(layer)})


def made(fit: dict[int, float] | None = None) -> tuple[KeyErrors, dict[int, CachedLayer]]:
    """Three layers without windows, keys of which are turned by a matrix and moved by a center.

    Args:
        fit: errors that the rotations state.
    """
    matrix = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(1))).Q
    layers = {}
    for layer_id, bits in BITS.items():
        transform = SideTransform(matrix, center=torch.ones(HEADS, D))
        layer = LayerFormat(HEADS, D, SideFormat(D, bits=bits, transform=transform), SideFormat(D))
        k, v = layer.key_layout, layer.value_layout
        rows = (torch.zeros(SLOTS, of.row_bytes, dtype=torch.uint8) for of in (k, v))
        windows = (torch.zeros(1, 0, HEADS, D) for _ in range(4))
        cache = LayerCache(k, v, Windows(0, 0, 0), *rows, *windows)
        layers[layer_id] = CachedLayer(cache, layer)
    found: Any = SimpleNamespace(layers=layers, seats=SimpleNamespace(device="cpu"), key_errors=fit, fingerprint="")
    return KeyErrors(found), layers


def measure(errors: KeyErrors, layers: dict[int, CachedLayer], spread: torch.Tensor, seed: int = 0) -> bool:
    """One pass over a prompt, padded by one token; whether it was measured.

    Args:
        spread: of keys by channel; that of queries is its inverse.
    """
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(TOKENS + 1, heads, D, generator=random) for heads in (2 * HEADS, HEADS, HEADS))
    q, k = q / spread, k * spread
    slots = torch.randperm(SLOTS, generator=random)[: TOKENS + 1]
    nowhere = torch.full_like(slots, -1)
    k[-1] = float("nan")
    measured = errors.begin(TOKENS)
    for layer_id, layer in layers.items():
        reference.store(layer.cache, StoreSlots(slots, nowhere, nowhere), k, v, layer.format)
        if measured:
            errors.add(Call(q, k, v, slots, layer_id, 1.0, None), TOKENS)
    return measured


def many(errors: KeyErrors, layers: dict[int, CachedLayer], spread: torch.Tensor) -> int:
    """As many passes as a result takes, and how many of them were measured."""
    return sum(measure(errors, layers, spread, seed) for seed in range(EVERY * CHUNKS))


EVEN = torch.ones(D)
UNEVEN = torch.cat([torch.full((1,), 40.0), torch.ones(D - 1)])
"""An outlier that queries hardly read, and that the matrix was not fitted to."""


def test_errors_by_layer() -> None:
    """Finer codes have smaller errors, exact keys none that could be measured; padding does not count."""
    errors, layers = made()
    assert many(errors, layers, EVEN) == CHUNKS
    assert value("key_error", CODED) is None
    measure(errors, layers, EVEN)
    coarse, fine = value("key_error", CODED), value("key_error", FINER)
    assert coarse is not None
    assert fine is not None
    assert 0.03 < coarse < 0.3
    assert fine < coarse / 10
    assert value("key_error", EXACT) is None
    assert value("key_error_growth", CODED) == 1


def test_short_prompts_do_not_count() -> None:
    errors, _ = made()
    assert not any(errors.begin(LEAST - 1) for _ in range(EVERY * CHUNKS))
    assert errors.begin(LEAST)


def test_an_error_that_doubles_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    errors, layers = made()
    with caplog.at_level(logging.WARNING):
        many(errors, layers, EVEN)
        many(errors, layers, EVEN)
        assert not caplog.records
        many(errors, layers, UNEVEN)
        many(errors, layers, UNEVEN)
        many(errors, layers, UNEVEN)
    (said,) = caplog.messages
    assert "times that of the first chunks" in said
    assert "fit rotations again" in said
    growth = value("key_error_growth", CODED)
    assert growth is not None
    assert growth > 2


def test_errors_are_compared_with_those_of_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    """The first result already is: nobody has to have seen the weights of the fit."""
    with caplog.at_level(logging.INFO):
        many(*made({CODED: 0.001, EXACT: 0, FINER: 1}), EVEN)
        assert not caplog.records
        errors, layers = made({CODED: 0.001, EXACT: 0, FINER: 1})
        many(errors, layers, EVEN)
        many(errors, layers, EVEN)
    (said,) = caplog.messages
    assert f"layer {CODED} has" in said
    assert "times that of the fit (0.0010)" in said


def test_rotations_that_state_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made()
    (said,) = caplog.messages
    assert "the first chunks served stand in" in said


def test_nan_does_not_count() -> None:
    errors, layers = made()
    measure(errors, layers, torch.full((D,), float("nan")))
    many(errors, layers, EVEN)
    found = value("key_error", CODED)
    assert found is not None
    assert 0.03 < found < 0.3


def test_a_server_that_warms_up_does_not_count() -> None:
    """Graphs of prompts are captured with zeros: these are not what later errors are compared with."""
    errors, layers = made()
    for _ in range(2):
        many(errors, layers, torch.zeros(D))
    assert value("key_error", CODED) is None
    for _ in range(3):
        many(errors, layers, EVEN)
    found = value("key_error_growth", CODED)
    assert found is not None
    assert 0.9 < found < 1.1
