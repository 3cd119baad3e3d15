"""What int2 mode adds to SGLang's Prometheus metrics."""

from __future__ import annotations

from typing import Any, Protocol


class Counter(Protocol):
    """What is counted up."""

    def inc(self, amount: float = 1) -> None:
        """Add to the count."""


def refill_counter(server_args: Any) -> Counter | None:
    """The counter ``sglang:oscar_sink_refills_total`` of this scheduler; None where metrics are off.

    All tensor-parallel ranks refill alike, so the first counts for all, unless SGLang counts them one by one.
    """
    from sglang.srt.runtime_context import get_parallel

    rank = get_parallel().attn_tp_rank
    if not server_args.enable_metrics or (rank and not server_args.enable_metrics_for_all_schedulers):
        return None
    # Imported late, as SGLang does: it reads the folder that the processes share from the environment.
    import prometheus_client

    labels = {"model_name": server_args.served_model_name, "tp_rank": str(rank)}
    counter = prometheus_client.Counter(
        "sglang:oscar_sink_refills_total",
        "Sink blocks of prefix hits that were computed again because none of the idle blocks held them.",
        labelnames=list(labels),
    )
    return counter.labels(**labels)
