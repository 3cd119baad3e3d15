"""Metrics of int2 mode stand beside SGLang's own, with the same labels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sglang_oscar import metrics
from sglang_oscar.features.tiers.reports import say_endless
from sglang_oscar.features.tiers.storage import CheckedStorage
from sglang_oscar.memory.sink_refill import SinkRefills
from sglang_oscar.requests import feature
from support.server_answers import INT2

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "dp_rank": 1, "site": "here"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing of another test, and nothing left to one."""

    def forget() -> None:
        for metric in metrics._metrics.values():
            REGISTRY.unregister(metric)
        metrics._metrics.clear()
        metrics._said.clear()
        metrics._labels, metrics._early = None, []

    forget()
    yield
    forget()


def scheduler(published: bool = True) -> Any:
    context = SimpleNamespace(collector=SimpleNamespace(labels=LABELS), current_scheduler_metrics_enabled=published)
    no_cache = SimpleNamespace(req_to_token_pool=None)
    return SimpleNamespace(metrics_collector_context=context, tree_cache=no_cache)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:oscar_{name}", {k: str(v) for k, v in LABELS.items()} | labels)


def test_refills_are_counted_by_replica() -> None:
    """Replicas of one server fell into one series: there was no dp_rank."""
    metrics.begin(scheduler())
    metrics.publish(INT2)
    refills = SinkRefills()
    assert refills.take() == []
    assert value("sink_refills_total") == 0
    refills.add(1, (1,))
    refills.add(2, (2,))
    assert len(refills.take()) == refills.total == 2
    assert value("sink_refills_total") == 2


def test_what_the_cache_is() -> None:
    metrics.begin(scheduler())
    metrics.publish(INT2)
    assert value("bits_per_element") == 2.25
    assert value("bits_per_element_at_128k") == 2.289
    told = {name: x for name, x in INT2.items() if name not in ("bits", "bits_at_128k", "group_sizes")}
    assert value("cache_info", group_sizes="128", **{name: str(x) for name, x in told.items()}) == 1


def test_what_happens_before_the_first_batch_is_counted() -> None:
    """Pages that a first prompt finds damaged, for one; labels are taken once."""
    metrics.publish(INT2)
    metrics.count("damaged_pages")
    assert metrics._metrics == {}
    feature.after_run_batch(None, scheduler(), None)
    feature.after_run_batch(None, scheduler(published=False), None)
    metrics.count("damaged_pages")
    assert value("damaged_pages_total") == 2
    assert value("bits_per_element") == 2.25


def test_damaged_pages_are_counted() -> None:
    metrics.begin(scheduler())
    metrics.publish(INT2)
    storage: Any = SimpleNamespace(_forget=lambda key: None)
    CheckedStorage._damaged(storage, "abc", "bits differ")
    assert value("damaged_pages_total") == 1


def test_pages_with_nan_are_counted() -> None:
    metrics.begin(scheduler())
    metrics.publish(INT2)
    assert value("nan_pages_total") == 0
    say_endless(0, 5)
    say_endless(3, 5)
    assert value("nan_pages_total") == 3


def test_ranks_that_publish_nothing_count_nothing() -> None:
    metrics.begin(scheduler(published=False))
    metrics.publish(INT2)
    metrics.count("sink_refills")
    assert metrics._metrics == {}
