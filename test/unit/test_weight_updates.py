"""Keys of storage once weights were updated: pages that other weights computed are never found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_oscar.features.tiers.storage import CheckedStorage
from sglang_oscar.features.tiers.weights import around_observe_weight_load
from sglang_oscar.formats import origin
from sglang_oscar.requests import lifecycle


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_update", "")


def key() -> str:
    """Of one page, in a server whose salt stays the same."""
    return CheckedStorage.key(SimpleNamespace(_salt="salt", _beside=SimpleNamespace(salt="")), "page")  # type: ignore[arg-type]


@contextmanager
def observed(self: Any, source: str) -> Iterator[None]:
    """SGLang's own."""
    yield


def update(seen: list[str], breaks_off: bool) -> None:
    """An update in whose midst a page is stored."""
    with around_observe_weight_load(observed, None, "disk"):
        seen.append(key())
        if breaks_off:
            raise OSError


@pytest.mark.parametrize("breaks_off", [False, True])
def test_an_update_changes_keys(breaks_off: bool) -> None:
    """While weights are written, and once they are: pages of old ones may be stored meanwhile."""
    seen = [key()]
    with suppress(OSError):
        update(seen, breaks_off)
    seen += [key(), key()]
    assert len(set(seen)) == 3
    assert seen[2] == seen[3]


def test_a_flush_changes_keys_behind_an_update_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it the cache may still hold what older weights computed, and store it; before it storage is shared."""
    of = SimpleNamespace(clear=lambda: None)
    monkeypatch.setattr(lifecycle, "cache_of", lambda pool: SimpleNamespace(seats=of, sinks=of, refills=of, resumed=of))
    pool = type("Pool", (lifecycle.ObservedSeats, Stock), {})()
    first = key()
    pool.clear()
    assert key() == first
    update([], breaks_off=False)
    updated = key()
    pool.clear()
    assert len({first, updated, key()}) == 3


class Stock:
    """SGLang's request pool."""

    def clear(self) -> None: ...


@pytest.mark.parametrize("what", ["disk", "tensor", "distributed", "ipc"])
def test_every_update_is_observed(what: str) -> None:
    """By the function that is hooked."""
    update = getattr(SchedulerWeightUpdaterManager, f"update_weights_from_{what}")
    assert "_observe_weight_load" in update.__code__.co_names
