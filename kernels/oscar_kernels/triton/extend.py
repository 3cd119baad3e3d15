"""Extend: causal attention of new chunks, exact within a chunk, over the cache before it.

A program owns a tile of query rows of one kv head (neighbouring tokens times the query heads that share the kv head)
and walks once over everything they see with one online softmax: the cached history, whose codes it unpacks as the
decode kernel does, the sinks, the recent ring, and the chunk itself (:mod:`oscar_kernels.triton.extend_kernel`).
Nothing is dequantized to memory, so memory does not grow with the prefix. Which request and which tokens a program
works on follows from the chunks' ``starts`` on the device; the grid depends on shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from oscar_kernels.cache import BatchTables, Chunks, LayerCache, check_lse
from oscar_kernels.parts import attend_parts, split_heads
from oscar_kernels.triton.dtypes import codebook_tensors, row_constants
from oscar_kernels.triton.extend_kernel import extend_kernel

STAGES = 2
"""Tiles of keys in flight, the one worked on included."""


def extend_parts(
    caches: Sequence[LayerCache],
    tables: BatchTables,
    chunks: Chunks,
    q_rot: torch.Tensor,
    sm_scale: float,
    lse: torch.Tensor | None = None,
    prefix_only: bool = False,
) -> torch.Tensor:
    """:func:`extend` of a layer in parts (:mod:`oscar_kernels.parts`), whose ``caches`` are in the order of heads."""
    apart = [
        Chunks(*own, chunks.starts)
        for own in zip(*(split_heads(x, caches) for x in (chunks.q, chunks.k, chunks.v)), strict=True)
    ]

    def attend(part: int, q: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        return extend(caches[part], tables, apart[part], q, sm_scale, lse=sums, prefix_only=prefix_only)

    return attend_parts(caches, attend, q_rot, lse)


def extend(
    cache: LayerCache,
    tables: BatchTables,
    chunks: Chunks,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    prefix_only: bool = False,
) -> torch.Tensor:
    """Causal attention of a chunk per request: exact within the chunk, over the cache before it.

    Runs before the chunk is stored: the ring may hold positions that the chunk is about to overwrite.

    Args:
        cache: the layer's cache, without the chunk.
        tables: the batch; ``kv_lens`` counts the cached tokens before the chunk and may be 0.
        chunks: the new tokens.
        q_rot: their queries rotated (:func:`oscar_kernels.triton.rotate.rotate`).
        sm_scale: factor on the logits.
        out: [tokens, q_heads, head_dim of the values]; in the dtype of ``q_rot`` where None. Rows beyond the last
            chunk are not written.
        lse: float32 [tokens, q_heads], contiguous; takes the log2 of the sum of exp2 of the logits (times log2 e),
            which FlashInfer's merge_state expects. -inf where nothing was attended to.
        prefix_only: attend to the cache only, every query to all of it; of ``chunks`` only ``starts`` is used.

    Returns:
        ``out``, in the basis of the cached values.
    """
    kv_heads, windows = cache.kv_heads, cache.windows
    tokens, q_heads, head_dim = q_rot.shape
    shape = (tokens, q_heads, cache.value_head_dim)
    if head_dim != cache.head_dim or q_heads % kv_heads:
        raise ValueError(f"queries {tuple(q_rot.shape)} do not fit {kv_heads} kv heads of {cache.head_dim}")
    if cache.k_sink.dtype != cache.k_ring.dtype:
        raise ValueError("sink store and ring must have one dtype")
    q, k, v = (q_rot,) * 3 if prefix_only else (chunks.q, chunks.k, chunks.v)
    for name, x in (("q", q), ("q_rot", q_rot), ("k", k), ("v", v)):
        if x.stride(2) != 1:
            raise ValueError(f"{name} must have contiguous channels")
    check_lse(lse, tokens, q_heads)
    out = torch.empty(shape, dtype=q_rot.dtype, device=q_rot.device) if out is None else out
    batch = chunks.starts.shape[0] - 1
    if tokens == 0 or batch == 0:
        return out
    gqa = q_heads // kv_heads
    block_m, block_n, warps = (128, 64, 8) if head_dim <= 128 else (64, 32, 8)
    per_tile = block_m // gqa
    extend_kernel[(triton.cdiv(tokens, per_tile) + batch, kv_heads)](
        q, q.stride(0), q.stride(1), q_rot, q_rot.stride(0), q_rot.stride(1), k, k.stride(0), k.stride(1), v,
        v.stride(0), v.stride(1), cache.k_rows, cache.v_rows,
        *codebook_tensors(cache.k_codebook, cache.k_layout.coding, q_rot), cache.k_sink, cache.v_sink, cache.k_ring,
        cache.v_ring, tables.page_table, tables.page_table.stride(0),
        tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block, chunks.starts, out, out.stride(0),
        out.stride(1), chunks.starts if lse is None else lse, batch, sm_scale, K_STRIDE=cache.k_rows.stride(0),
        V_STRIDE=cache.v_rows.stride(0), KV_HEADS=kv_heads, GQA=gqa,
        **row_constants(cache), PAGE=tables.page_size,
        SINK=windows.sink, RECENT=windows.recent, RING=max(windows.ring, 1), HAS_CHUNK=not prefix_only,
        HAS_LSE=lse is not None, BATCH=max(triton.next_power_of_2(batch), 64), TOKENS=per_tile, BLOCK_M=block_m,
        BLOCK_N=block_n, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return out
