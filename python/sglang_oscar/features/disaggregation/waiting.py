"""Requests of a decode server whose prompts come from a prefill server: their seats, sinks, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.features.disaggregation.arguments import waiting_seats
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.images import sink_images
from sglang_oscar.memory.part import Part, Sizing
from sglang_oscar.requests import late_kernels, lifecycle
from sglang_oscar.requests.ending import end


def around_pre_alloc(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a request a ring and a sink block when SGLang gives it a seat, before anything arrives.

    The ring holds the last tokens of the prompt once they have arrived. The block is shared with requests that begin
    alike, or computed before the next forward pass. A request with embeddings of its own is ended before it runs: its
    sink cannot be computed here.
    """
    result = original(self, req, *args, **kwargs)
    cache = cache_of(self.req_to_token_pool)
    if cache is not None:
        late_kernels.begin(cache.seats.device)
        seat, tokens = releases.seat(req), releases.committed_tokens(req)
        if cache.seats.may_be_written(seat) and self.scheduler.enable_overlap and cache.seats.device.type == "cuda":
            # The last owner of the seat may still be decoded once more, while the ring arrives.
            self.scheduler.forward_stream.synchronize()
        begin = max(0, tokens - cache.plan.geometry.windows.recent)
        cache.seats.assign(seat, ring_start=begin, sink_block=acquire_block(cache, req, tokens))
    return result


@dataclass(frozen=True)
class WaitingRequests(Part):
    """Requests whose prompts are on their way, which hold windows beside the running ones."""

    seats: int

    flag = "--disaggregation-decode-extra-slots"

    @property
    def waiting(self) -> int:
        """Requests that hold a window beside the running ones."""
        return self.seats


def parts(sizing: Sizing) -> list[WaitingRequests]:
    """Nothing on a server that is no decode server."""
    seats = waiting_seats(releases.resolved(sizing.configurator.server_args))
    return [WaitingRequests(seats)] if seats else []


def acquire_block(cache: Int2Cache, req: Any, tokens: int) -> int:
    """A sink block with the sink of a request's first ``tokens`` tokens, from the next forward pass on; 0 for none."""
    sink = cache.plan.geometry.windows.sink
    if lifecycle.has_own_embeddings(req):
        end(
            req,
            "a decode server takes no embeddings in place of token ids; send input_ids",
            status=HTTPStatus.BAD_REQUEST,
        )
        return 0
    if sink == 0:
        return 0
    if tokens >= sink:
        return lifecycle.acquire_refilled(cache, req)
    # Decoding completes it.
    block = cache.sinks.acquire_private()
    ids = (*req.origin_input_ids, *req.output_ids)[:tokens]
    cache.refills.add(block, ids, sink_images(req, tokens), req.lora_id)
    return block
