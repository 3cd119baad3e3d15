"""What int2 mode adds to SGLang's Prometheus metrics, with the labels that SGLang gives its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

PREFIX = "sglang:oscar_"
COUNTED = {
    "sink_refills": "Sink blocks of prefix hits that were computed again because none of the idle blocks held them.",
    "late_kernels": "Kernels that were built while requests waited; the log names them.",
    "broken_requests": "Requests that came out as NaN and were ended.",
    "damaged_pages": "Pages of storage that were read, found damaged and computed again.",
    "nan_pages": "Pages that were not stored because they, or pages before them, hold NaN.",
}
"""What is counted up, by name: ``sglang:oscar_<name>_total``."""
GAUGES = {
    "bits_per_element": "Stored bits per key or value channel, scales included, windows left out.",
    "bits_per_element_at_128k": "The same of a request of 128K tokens, its windows included.",
    "cache_info": "1; its labels are the facts that /server_info shows, but for bits. 0 with those before a refit.",
}
"""What says how the cache is stored, by name: ``sglang:oscar_<name>``."""
LAYERS = {
    "key_error": "Relative error of logits by codes of keys, by layer, with `SGLANG_OSCAR_KEY_ERRORS=1`.",
    "key_error_growth": "The same over that of the fit.",
}
"""What is said of every layer, by name: ``sglang:oscar_<name>`` with the label ``layer``."""

_labels: dict[str, str] | None = None
"""Of this process's scheduler; None where it publishes nothing."""
_early: list[Callable[[], None]] | None = []
"""What was said before the labels were known; None from then on."""
_metrics: dict[str, Any] = {}
_said: dict[str, dict[str, str]] = {}
"""Labels of gauges."""


def begin(scheduler: Any) -> None:
    """At the first batch of a scheduler: take over its labels, which are model, engine type, ranks and those of
    --extra-metric-labels, and publish what was said before.

    All tensor-parallel ranks count alike, so only those publish whose numbers SGLang publishes.

    Args:
        scheduler: SGLang's.
    """
    if _early is not None:
        context = scheduler.metrics_collector_context
        use_labels(dict(context.collector.labels) if context.current_scheduler_metrics_enabled else None)


def use_labels(labels: dict[str, Any] | None) -> None:
    """Publish with these labels from now on; None publishes nothing."""
    global _labels, _early
    _labels = None if labels is None else {name: str(value) for name, value in labels.items()}
    said, _early = _early or [], None
    for say in said:
        say()


def count(name: str, amount: int = 1) -> None:
    """Count up one of :data:`COUNTED`."""
    if _labels is None:
        _later(count, name, amount)
    else:
        _metric("Counter", name, COUNTED[name], tuple(_labels)).labels(**_labels).inc(amount)


def publish(facts: dict[str, Any]) -> None:
    """Say what the cache is, and begin to count.

    Args:
        facts: of :func:`sglang_oscar.memory.facts.facts`.
    """
    if _labels is None:
        return _later(publish, facts)
    for name in COUNTED:
        count(name, 0)
    told = {name: ",".join(map(str, x)) if isinstance(x, list) else str(x) for name, x in facts.items()}
    values = {"bits_per_element": told.pop("bits"), "bits_per_element_at_128k": told.pop("bits_at_128k")}
    for name, text in GAUGES.items():
        # What prometheus_client calls Info cannot be published by several processes.
        value, more = (values[name], {}) if name in values else (1, told)
        labels = _labels | more
        gauge = _metric("Gauge", name, text, tuple(labels), multiprocess_mode="mostrecent")
        if (before := _said.get(name, labels)) != labels:
            gauge.labels(**before).set(0)
        gauge.labels(**labels).set(float(value))
        _said[name] = labels


def publish_layers(name: str, values: dict[int, float]) -> None:
    """Set one of :data:`LAYERS`, by layer id."""
    if _labels is None:
        return _later(publish_layers, name, values)
    gauge = _metric("Gauge", name, LAYERS[name], (*_labels, "layer"), multiprocess_mode="mostrecent")
    for layer, value in values.items():
        gauge.labels(**_labels, layer=str(layer)).set(value)


def _later(say: Callable[..., None], *said: Any) -> None:
    """Say it once labels are known; nothing where they are, and nothing is published."""
    if _early is not None:
        _early.append(partial(say, *said))


def _metric(kind: str, name: str, text: str, labels: tuple[str, ...], **options: Any) -> Any:
    """A metric of the process, made once."""
    if name not in _metrics:
        # Imported late, as SGLang does: it reads the folder that the processes share from the environment.
        import prometheus_client

        _metrics[name] = getattr(prometheus_client, kind)(f"{PREFIX}{name}", text, labelnames=labels, **options)
    return _metrics[name]
