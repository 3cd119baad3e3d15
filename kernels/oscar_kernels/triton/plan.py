"""Who works on what: borders of a request's segments and the cut of a batch's history into pieces, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_lengths(kv_len, ring_start, SINK: tl.constexpr, RECENT: tl.constexpr):
    """:func:`oscar_kernels.cache.split_positions` on the device."""
    sink_end = tl.minimum(kv_len, SINK)
    ring_begin = kv_len if RECENT == 0 else tl.maximum(kv_len - RECENT, ring_start)
    return sink_end, tl.minimum(tl.maximum(ring_begin, sink_end), kv_len)


@triton.jit
def plan_pieces(
    kv_lens_ptr, ring_start_ptr, batch, pieces, SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, BATCH: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """Pieces of every request, or of every one of PASSES passes over each, [BATCH] int32: in all at most ``pieces`` +
    batch.

    They are at most ``pieces`` where that is twice the batch or more.
    Tiles are aligned to BLOCK_N, so that none crosses a page at least as large. The piece length in tiles follows
    from the total.
    """
    request = tl.arange(0, BATCH)
    live = request < batch
    kv_len = tl.load(kv_lens_ptr + request // PASSES, mask=live, other=0)
    ring_start = tl.load(ring_start_ptr + request // PASSES, mask=live, other=0)
    begin, end = split_lengths(kv_len, ring_start, SINK, RECENT)
    tiles = tl.where(end > begin, (end + BLOCK_N - 1) // BLOCK_N - begin // BLOCK_N, 0)
    # Every request's last piece may be short. Leave room for that, so that the pieces fill the GPU evenly.
    full = tl.maximum(pieces - tl.sum((tiles > 0).to(tl.int32), 0), (pieces + 1) // 2)
    length = tl.maximum((tl.sum(tiles, 0) + full - 1) // full, MIN_TILES)
    return request, (tiles + length - 1) // length
