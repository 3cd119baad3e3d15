"""The chunks of a dump on the device that works on them, read ahead where that device is a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from oscar_rotation.dump.reader import DumpChunk, DumpReader
from oscar_rotation.math.finite import all_finite

AHEAD = 3
"""Chunks that are read while the GPU works on one: a chunk is read more slowly than it is worked on."""


def stream_chunks(
    reader: DumpReader, places: Sequence[tuple[int, int]], device: torch.device, ahead: int | None = None
) -> Iterator[DumpChunk]:
    """Load chunks in order.

    Args:
        reader: of the dump.
        places: (layer, chunk) of each.
        device: where to. For a GPU chunks are read into pinned memory, and values are checked where that is cheap.
        ahead: chunks that threads read in advance; by default none on a CPU, which has no time to spare, and
            :data:`AHEAD` on a GPU.

    Yields:
        the chunks, on ``device``.

    Raises:
        DumpError: as :meth:`DumpReader.load`.
    """
    if ahead is None:
        ahead = 0 if device.type == "cpu" else AHEAD
    if not ahead:
        for layer, chunk in places:
            yield reader.load(layer, chunk).to(device)
        return

    def read(layer: int, chunk: int) -> DumpChunk:
        loaded = reader.load(layer, chunk, check_values=False)
        return loaded.pinned() if device.type == "cuda" else loaded

    waiting: deque[Future[DumpChunk]] = deque()
    left = iter(places)
    with ThreadPoolExecutor(ahead) as pool:
        try:
            for place in places:
                while len(waiting) < ahead and (following := next(left, None)) is not None:
                    waiting.append(pool.submit(read, *following))
                moved = waiting.popleft().result().to(device)
                if not all_finite(moved.q, moved.k, moved.v):
                    reader.load(*place)  # raises, naming the file
                yield moved
        finally:
            pool.shutdown(cancel_futures=True)
