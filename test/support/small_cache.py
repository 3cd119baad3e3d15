"""An INT2 cache without a server: real tables, stores and windows of a few requests, for unit tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.owned import of_every_server
from sglang_oscar.memory.seat_tables import SeatTables
from sglang_oscar.memory.sink_store import SinkStore
from sglang_oscar.memory.window_buffers import WindowBuffers

LONGEST = 64
"""Tokens of a request at most."""


def small_cache(
    windows: Windows, seats: int = 4, blocks: int = 5, copies: int = 0, layers: int = 2, page_size: int = 4,
    longest: int = LONGEST, pool: Any = None, requests: Any = None,
) -> Int2Cache:  # fmt: skip
    """A cache whose requests own what those of every server do; dummies count, ``copies`` lie beside states. A
    ``pool`` of history has ``seats * longest`` slots; ``requests`` stands for SGLang's request pool."""
    geometry: Any = Geometry.uniform(RowLayout(2, 64, 64, torch.bfloat16), windows, torch.bfloat16, layers)
    slots = torch.arange(seats * longest, dtype=torch.int32).view(seats, longest)
    requests = requests or SimpleNamespace()
    requests.req_to_token = slots
    pool = pool or SimpleNamespace(k_buffer=[torch.zeros(slots.numel(), 8, dtype=torch.uint8)], v_buffer=[])
    plan: Any = SimpleNamespace(geometry=geometry, copies=copies)
    cache = Int2Cache(
        settings=SimpleNamespace(), plan=plan, page_size=page_size, req_to_token_pool=requests,
        seats=SeatTables(seats, "cpu"), sinks=SinkStore(blocks), layers={}, fingerprint="",
        window_buffers=WindowBuffers(geometry, seats + copies, blocks + copies, "cpu"),
    )  # fmt: skip
    cache.attach(pool)
    cache.holdings |= of_every_server(SimpleNamespace(cache=cache, pool=pool))
    return cache
