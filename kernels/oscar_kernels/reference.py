"""Store and attention in plain torch: correct everywhere, fast nowhere.

This is what a machine without a GPU serves with and what the Triton kernels are tested against. Arithmetic is
float32; keys and values come out of the cache exactly as :mod:`oscar_kernels.codec` defines them.
"""

from __future__ import annotations

import math

import torch

from oscar_kernels.cache import (
    BatchTables,
    Chunks,
    LayerCache,
    StoreSlots,
    check_layouts,
    check_new_tokens,
    split_positions,
)
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.format import LayerFormat
from oscar_kernels.visible import mask_of
from oscar_kernels.weighted_sum import weighted_sum

LOG2_E = math.log2(math.e)
QUERY_BLOCK = 512
"""Queries per block of the extend reference: bounds the score matrix to block x keys per head."""


def rotate(x: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    """x @ matrix in float32.

    Args:
        x: [..., heads, head_dim].
        matrix: [head_dim, head_dim], or [kv_heads, head_dim, head_dim] with a matrix for every ``heads / kv_heads``
            consecutive heads; None for identity.
    """
    if matrix is None or matrix.dim() == 2:
        return x.float() if matrix is None else x.float() @ matrix.float()
    return (x.float().unflatten(-2, (matrix.shape[0], -1)) @ matrix.float()).flatten(-3, -2)


def store(cache: LayerCache, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor, layer: LayerFormat) -> None:
    """Transform, clip, quantize and write new tokens to the history pool, the ring and the sink store.

    Args:
        cache: the layer's cache, written in place.
        slots: destination of every token.
        k, v: [tokens, kv_heads, head_dim]; keys after RoPE.
        layer: the format of the layer; without a value matrix where values come multiplied by it.

    Raises:
        ValueError: the cache has rows of another layout.
    """
    check_layouts(cache, layer.key_layout, layer.value_layout)
    halves = (
        (k, layer.key, cache.k_layout, cache.k_rows, cache.k_ring, cache.k_sink),
        (v, layer.value, cache.v_layout, cache.v_rows, cache.v_ring, cache.v_sink),
    )
    for x, side, layout, rows, ring, sink in halves:
        transform = side.transform
        y = rotate(x, transform.matrix)
        if transform.center is not None:
            y = y - transform.center
        rows[slots.row] = encode_rows(y, layout, transform.clip, transform.gain, side.codebook)
        for window, index in ((ring, slots.ring), (sink, slots.sink)):
            kept = index >= 0
            if window.numel() and bool(kept.any()):
                window.view(-1, *window.shape[2:])[index[kept]] = y[kept].to(window.dtype)


def gather(cache: LayerCache, tables: BatchTables, request: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [0, kv_len) of one request, in the rotated basis.

    Returns:
        two float32 tensors [kv_len, kv_heads, head_dim].
    """
    ring_start = int(tables.ring_start[request])
    sink_end, ring_begin = split_positions(kv_len, ring_start, cache.windows)
    positions = torch.arange(kv_len, device=cache.k_rows.device)
    history = positions[sink_end:ring_begin]
    pages = tables.page_table[request].long()[history // tables.page_size]
    rows = pages * tables.page_size + history % tables.page_size
    recent = positions[ring_begin:] % max(cache.windows.ring, 1)
    block, ring_row = int(tables.sink_block[request]), int(tables.ring_row[request])
    out = []
    for row_buffer, layout, ring, sink, codebook in (
        (cache.k_rows, cache.k_layout, cache.k_ring, cache.k_sink, cache.k_codebook),
        (cache.v_rows, cache.v_layout, cache.v_ring, cache.v_sink, None),
    ):
        # Ten times as fast as indexing of bytes.
        parts = [decode_rows(row_buffer.index_select(0, rows), layout, codebook)]
        if sink_end:
            parts.insert(0, sink[block, :sink_end].float())
        if ring_begin < kv_len:
            parts.append(ring[ring_row].index_select(0, recent).float())
        out.append(torch.cat(parts))
    return out[0], out[1]


def decode(
    cache: LayerCache,
    tables: BatchTables,
    q: torch.Tensor,
    reading: torch.Tensor | None,
    sm_scale: float,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per request over everything cached, itself included.

    Args:
        cache: the layer's cache; the new tokens are stored in it already.
        tables: the batch; ``kv_lens`` counts the new token.
        q: [batch, q_heads, head_dim], not rotated.
        reading: what queries of stored keys are multiplied by
            (:attr:`oscar_kernels.transform.SideTransform.reading`), as :func:`rotate` takes it.
        sm_scale: factor on the logits.
        lse: float32 [batch, q_heads]; takes the log2 of the sum of exp2 of the logits (times log2 e), unless None.

    Returns:
        float32 [batch, q_heads, head_dim of the values] in the basis of the cached values.
    """
    kv_heads, head_dim = cache.k_layout.kv_heads, cache.k_layout.head_dim
    queries = rotate(q, reading).view(q.shape[0], kv_heads, -1, head_dim) * sm_scale
    out = queries.new_empty(*queries.shape[:-1], cache.value_head_dim)
    for request, kv_len in enumerate(tables.kv_lens.tolist()):
        k, v = gather(cache, tables, request, kv_len)
        scores = torch.einsum("hgd,thd->hgt", queries[request], k)
        if lse is not None:
            lse[request] = scores.logsumexp(-1).flatten() * LOG2_E
        out[request] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v)
    return out.view(q.shape[0], -1, cache.value_head_dim)


def verify(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor,
    q: torch.Tensor,
    reading: torch.Tensor | None,
    sm_scale: float,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of several new tokens per request over what is cached before them and to one another.

    New tokens are read from the ring, whatever their positions: token ``i`` of a request lies where position
    ``kv_len + i`` does. All of them see the same history and windows, those of the request before its new tokens.

    Args:
        cache: the layer's cache; the new tokens are stored in it already. The ring holds ``recent`` tokens and the new
            ones at least.
        tables: the batch; ``kv_lens`` counts the cached tokens before the new ones.
        visible: int64 [batch, tokens], which new tokens each of them sees (:mod:`oscar_kernels.visible`).
        q: [batch * tokens, q_heads, head_dim], request after request, not rotated.
        reading: what queries of stored keys are multiplied by
            (:attr:`oscar_kernels.transform.SideTransform.reading`), as :func:`rotate` takes it.
        sm_scale: factor on the logits.
        lse: float32 [batch * tokens, q_heads]; takes the log2 of the sum of exp2 of the logits (times log2 e), unless
            None.

    Returns:
        float32 [batch * tokens, q_heads, head_dim of the values] in the basis of the cached values.
    """
    (batch, tokens), windows = visible.shape, cache.windows
    check_new_tokens(windows, tokens)
    kv_heads, head_dim = cache.k_layout.kv_heads, cache.k_layout.head_dim
    queries = rotate(q, reading).view(batch, tokens, kv_heads, -1, head_dim) * sm_scale
    seen = mask_of(visible)
    out = queries.new_empty(*queries.shape[:-1], cache.value_head_dim)
    for request, kv_len in enumerate(tables.kv_lens.tolist()):
        k, v = gather(cache, tables, request, kv_len)
        new = torch.arange(kv_len, kv_len + tokens, device=q.device) % windows.ring
        row = int(tables.ring_row[request])
        k, v = torch.cat([k, cache.k_ring[row, new].float()]), torch.cat([v, cache.v_ring[row, new].float()])
        scores = torch.einsum("qhgd,thd->hgqt", queries[request], k)
        shown = torch.cat([seen.new_ones(tokens, kv_len), seen[request]], dim=1)
        scores.masked_fill_(~shown, float("-inf"))
        out[request] = weighted_sum(scores.softmax(-1), v, shown)
        if lse is not None:
            sums = scores.logsumexp(-1).movedim(-1, 0).flatten(1) * LOG2_E
            lse[request * tokens : (request + 1) * tokens] = sums
    return out.view(batch * tokens, -1, cache.value_head_dim)


def extend(
    cache: LayerCache,
    tables: BatchTables,
    chunks: Chunks,
    reading: torch.Tensor | None,
    sm_scale: float,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a chunk per request: exact within the chunk, over the cache before it.

    Runs before the chunk is stored: the ring may hold positions that the chunk is about to overwrite.

    Args:
        cache: the layer's cache, without the chunk.
        tables: the batch; ``kv_lens`` counts the cached tokens before the chunk.
        chunks: the new tokens.
        reading: what queries of stored keys are multiplied by
            (:attr:`oscar_kernels.transform.SideTransform.reading`), as :func:`rotate` takes it.
        sm_scale: factor on the logits.
        lse: float32 [tokens, q_heads]; takes the log2 of the sum of exp2 of the logits (times log2 e), unless None.

    Returns:
        float32 [tokens, q_heads, head_dim of the values] in the basis of the cached values.
    """
    kv_heads, head_dim = cache.k_layout.kv_heads, cache.k_layout.head_dim
    q, k, v, lengths = chunks.q, chunks.k, chunks.v, chunks.starts.diff().tolist()
    out = torch.empty(*q.shape[:2], cache.value_head_dim, dtype=torch.float32, device=q.device)
    begin = 0
    for request, (prefix_len, length) in enumerate(zip(tables.kv_lens.tolist(), lengths, strict=True)):
        span = slice(begin, begin + length)
        chunk_k, chunk_v = k[span].float(), v[span].float()
        prefix_k, prefix_v = gather(cache, tables, request, prefix_len)
        values = torch.cat([prefix_v, chunk_v])
        for start in range(0, length, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, length)
            block = q[begin + start : begin + stop]
            heads = block.float().view(stop - start, kv_heads, -1, head_dim) * sm_scale
            rotated = rotate(block, reading).view_as(heads) * sm_scale
            own = torch.einsum("qhgd,thd->hgqt", heads, chunk_k[:stop])
            scores = torch.cat([torch.einsum("qhgd,thd->hgqt", rotated, prefix_k), own], dim=-1)
            last = torch.arange(prefix_len + start, prefix_len + stop, device=q.device)
            seen = torch.arange(prefix_len + stop, device=q.device) <= last[:, None]
            scores.masked_fill_(~seen, float("-inf"))
            if lse is not None:
                lse[begin + start : begin + stop] = scores.logsumexp(-1).movedim(-1, 0).flatten(1) * LOG2_E
            mixed = weighted_sum(scores.softmax(-1), values[: prefix_len + stop], seen)
            out[begin + start : begin + stop] = mixed.reshape(stop - start, -1, cache.value_head_dim)
        begin += length
    return out
