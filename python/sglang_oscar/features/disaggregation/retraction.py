"""Retracted requests of a decode server, which go on without a prefill: SGLang keeps their rows on the host meanwhile.

The recent window is kept beside them, so that a request goes on as if nothing had been.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import cache_of

_ATTRIBUTE = "oscar_recent"


def before_offload(self: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """Keep the recent window of a request that loses its row."""
    cache = cache_of(req_to_token_pool)
    if cache is not None:
        if cache.side.ring.is_cuda:
            # The step under way writes to the ring on another stream. SGLang waits for it a moment later, too.
            torch.cuda.synchronize()
        setattr(self, _ATTRIBUTE, cache.side.row_of_ring(releases.row(self)).to("cpu", copy=True))


def after_load(result: None, self: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> None:
    """Put it into the row that the request has now."""
    cache = cache_of(req_to_token_pool)
    if cache is not None:
        cache.side.row_of_ring(releases.row(self)).copy_(getattr(self, _ATTRIBUTE))
        delattr(self, _ATTRIBUTE)
