"""Decode: attention of one new token per request, or several in verification, over its cache, split over the sequence.

The history of the batch is cut into *pieces*, runs of tiles of one request, and the sinks and recent tokens into
window parts of WINDOW_PART tokens. One grid covers them all (:mod:`oscar_kernels.triton.decode_kernel`); each program
attends to one of them with BLOCK_H kv heads and leaves a normalized partial result with its log-sum-exp; a second
kernel merges the partials of a request (:mod:`oscar_kernels.triton.merge`).
"""

from __future__ import annotations

import torch
import triton

from oscar_kernels.cache import BatchTables, LayerCache, Windows, check_lse, check_queries, check_visible
from oscar_kernels.layout import CODEBOOK
from oscar_kernels.prepared import Output, SplitMatrix
from oscar_kernels.triton.decode_kernel import decode_kernel
from oscar_kernels.triton.dtypes import codebook_tensors, row_constants
from oscar_kernels.triton.merge import merge_kernel

WINDOW_PART = 128
"""Window tokens of one program, unless that takes more programs than the windows allow."""
WAVES = 1
"""Pieces per resident program: more balance the GPU better, fewer leave less to merge."""
MIN_TILES = 4
"""Tiles that a piece has at least."""
HEADS_PER_PROGRAM = 2
"""kv heads, and so warps, of a program at most."""
BLOCK_W = 16
"""Tokens of a tile of a window."""
MOST_COLUMNS = 16
"""Query heads, of one token after the other, that read a kv head together in verification; one token may have more."""
MOST_PASSES = 4096
"""Requests of a verification times passes over each: with more, partial results take gigabytes and plans long."""
MOST_PROGRAMS = 65_535
"""In the second dimension of a grid, which is CUDA's limit."""
MERGED_AT_ONCE = 64
"""Partial results that a program of the merge reads at a time."""
MOST_MERGED = 32
"""Query heads that a program merges and multiplies at most."""
STAGES = 6
"""Tiles in flight, the one worked on included."""
BOOK_STAGES = 4
"""The same where keys have a codebook: points that are looked up are in flight, too, and 16 warps share the memory."""
EXACT_TILE = 16
"""Tokens of a tile of history of which a side is left exact: such rows have up to eight times the bytes."""
EXACT_BYTES = 64 * 1024
"""Of such tiles in flight; two are there in any case."""


def window_parts(windows: Windows, drafts: int = 0) -> tuple[int, int, int]:
    """Programs per request for the sink store and for the ring, and the tokens of each.

    In verification the ring has ``drafts`` new tokens besides the recent ones.
    """
    part, recent = WINDOW_PART, windows.recent + drafts
    bound = max(windows.max_splits, (windows.sink > 0) + (recent > 0))
    while triton.cdiv(windows.sink, part) + triton.cdiv(recent, part) > bound:
        part *= 2
    return triton.cdiv(windows.sink, part), triton.cdiv(recent, part), part


def queries_at_once(drafts: int, gqa: int) -> int:
    """Tokens of a request that one pass works on: passes of one size, of at most MOST_COLUMNS columns."""
    passes = triton.cdiv(drafts, max(min(MOST_COLUMNS // gqa, drafts), 1))
    return triton.cdiv(drafts, passes)


def passes_of(drafts: int, gqa: int) -> tuple[int, int]:
    """(tokens of a request that one pass works on, passes): one token in one pass without drafts."""
    queries = queries_at_once(drafts, gqa) if drafts else 1
    return queries, triton.cdiv(max(drafts, 1), queries)


def tile_shape(cache: LayerCache, block_h: int) -> tuple[int, int, int | None]:
    """(tokens of a tile of history, tiles in flight, register limit) of programs of ``block_h`` kv heads.

    128 registers let 16 warps share a multiprocessor; what more channels need does not fit them.
    """
    registers = None if cache.head_dim > 128 or cache.value_head_dim > 128 else 128
    key, value = cache.k_layout, cache.v_layout
    if not (key.exact or value.exact):
        return 32, BOOK_STAGES if key.coding == CODEBOOK else STAGES, registers
    tile_bytes = EXACT_TILE * block_h * (key.head_bytes + value.head_bytes)
    return EXACT_TILE, min(max(EXACT_BYTES // tile_bytes, 2), STAGES), registers


def _processors(cache: LayerCache) -> int:
    """Multiprocessors of the GPU."""
    device = cache.k_rows.device
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def default_pieces(cache: LayerCache) -> int:
    """Pieces that fill the GPU: about 16 warps on every multiprocessor, WAVES times over."""
    return max(1, WAVES * _processors(cache) * 16 // max(cache.kv_heads, 1))


def workspace_numel(cache: LayerCache, q_heads: int, batch: int, drafts: int = 0) -> int:
    """float32 elements that :func:`decode`, or :func:`verify` with ``drafts``, needs for partial results of up to
    ``batch`` requests.
    """
    queries, _ = passes_of(drafts, q_heads // cache.kv_heads)
    partials = partials_of(cache, q_heads, batch, default_pieces(cache), drafts)
    return partials * q_heads * queries * (cache.value_head_dim + 1)


def partials_of(cache: LayerCache, q_heads: int, batch: int, pieces: int, drafts: int) -> int:
    """Partial results of up to ``batch`` requests with ``pieces`` of history besides one per request: as many
    programs of every block of heads.
    """
    _, passes = passes_of(drafts, q_heads // cache.kv_heads)
    return pieces + batch * passes * (1 + sum(window_parts(cache.windows, drafts)[:2]))


def unsupported_verify(cache: LayerCache, q_heads: int, batch: int, drafts: int) -> str | None:
    """Why :func:`verify` cannot take ``drafts`` new tokens of each of ``batch`` requests on a GPU, or None."""
    _, passes = passes_of(drafts, q_heads // cache.kv_heads)
    of_a_request = partials_of(cache, q_heads, 1, 0, drafts)
    most = min(MOST_PASSES // passes, (MOST_PROGRAMS - default_pieces(cache)) // of_a_request)
    if batch > most:
        return f"the Triton kernel takes {drafts} new tokens of {most} requests at a time, not of {batch}"
    return None


def decode(
    cache: LayerCache,
    tables: BatchTables,
    q_rot: torch.Tensor,
    sm_scale: float,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    reading: SplitMatrix | None = None,
) -> torch.Tensor:
    """Attention of one query per request over its cached tokens, in a decode step the new one included.

    Nothing depends on lengths on the host, so a captured CUDA graph stays valid when ``tables`` change in place.

    Args:
        cache: the layer's cache, both sides with scales of one dtype; in a decode step the new tokens are stored in
            it already.
        tables: the batch; ``kv_lens`` counts what is attended to. Requests of length 0 get zeros.
        q_rot: [batch, q_heads, head_dim], rotated, bfloat16 or float16; channels contiguous.
        sm_scale: factor on the logits.
        out: [batch, q_heads, head_dim of the values] with contiguous channels; in the dtype of ``q_rot`` where None.
        workspace: float32 of :func:`workspace_numel` elements or more; allocated where None.
        lse: float32 [batch, q_heads], contiguous; takes the log2 of the sum of exp2 of the logits (times log2 e), -inf
            for requests of length 0. Nothing of the kind is written where None.
        reading: what outputs are multiplied by before they are written; in rows.

    Returns:
        ``out``, in the basis of the cached values, or of what ``reading`` makes of it.
    """
    return _attend(cache, tables, None, q_rot, sm_scale, workspace, Output(out, lse, reading))


def verify(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor,
    q_rot: torch.Tensor,
    sm_scale: float,
    workspace: torch.Tensor | None = None,
    reading: SplitMatrix | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of several new tokens per request, as :func:`oscar_kernels.reference.verify` defines it.

    History is read once for every MOST_COLUMNS query heads of a kv head, of whichever tokens.

    Args:
        cache: the layer's cache; the new tokens are stored in it already.
        tables: the batch; ``kv_lens`` counts the tokens before the new ones.
        visible: int64 [batch, tokens], contiguous: which new tokens each of them sees
            (:mod:`oscar_kernels.visible`).
        q_rot: [batch * tokens, q_heads, head_dim], otherwise as for :func:`decode`.
        sm_scale, workspace, reading, lse: as for :func:`decode`; there is one sum for every new token.

    Returns:
        Like ``q_rot``, as :func:`decode`.

    Raises:
        ValueError: the ring is too small, or ``visible`` does not fit the queries.
    """
    check_visible(cache.windows, visible, len(q_rot))
    return _attend(cache, tables, visible, q_rot, sm_scale, workspace, Output(None, lse, reading))


def _attend(
    cache: LayerCache,
    tables: BatchTables,
    visible: torch.Tensor | None,
    q_rot: torch.Tensor,
    sm_scale: float,
    workspace: torch.Tensor | None,
    output: Output,
) -> torch.Tensor:
    out, lse, reading = output
    kv_heads, windows = cache.kv_heads, cache.windows
    tokens, q_heads, head_dim = *q_rot.shape[:2], cache.value_head_dim
    batch, drafts = (tokens, 0) if visible is None else visible.shape
    gqa = q_heads // kv_heads
    queries, passes = passes_of(drafts, gqa)
    check_queries(cache, q_rot)
    out = q_rot.new_empty(tokens, q_heads, head_dim) if out is None else out
    check_lse(lse, tokens, q_heads)
    if reading is not None:
        reading.check(kv_heads, q_rot.dtype, arranged=False)
    if batch == 0:
        return out
    pieces = default_pieces(cache)
    sink_parts, ring_parts, part = window_parts(windows, drafts)
    numel = workspace_numel(cache, q_heads, batch, drafts)
    # From here on a request is a pass over one, and heads are those of all tokens of a pass.
    batch, rows = batch * passes, q_heads * queries
    partials = pieces + batch * (1 + sink_parts + ring_parts)
    if workspace is None:
        workspace = torch.empty(numel, dtype=torch.float32, device=q_rot.device)
    elif workspace.numel() < numel or workspace.dtype != torch.float32:
        raise ValueError(f"workspace must hold {numel} float32, got {workspace.numel()} {workspace.dtype}")
    partial_lse = workspace[partials * rows * head_dim :]
    block_h = min(triton.next_power_of_2(kv_heads), HEADS_PER_PROGRAM)
    block_n, stages, registers = tile_shape(cache, block_h)
    shared = {
        "SINK": windows.sink,
        "RECENT": windows.recent,
        "WINDOW_PARTS": sink_parts + ring_parts,
        "MIN_TILES": MIN_TILES,
        # One of few values, so that few variants are compiled.
        "BATCH": max(triton.next_power_of_2(batch), 64),
        "BLOCK_N": block_n,
        "GQA": gqa,
        "DRAFTS": drafts,
        "QUERIES": queries,
        "PASSES": passes,
    }
    decode_kernel[(triton.cdiv(kv_heads, block_h), partials)](
        q_rot, q_rot.stride(0), q_rot.stride(1), q_rot if visible is None else visible, cache.k_rows, cache.v_rows,
        *codebook_tensors(cache.k_codebook, cache.k_layout.coding, q_rot), cache.k_sink, cache.v_sink, cache.k_ring,
        cache.v_ring, tables.page_table, tables.page_table.stride(0),
        tables.kv_lens, tables.ring_row,
        tables.ring_start, tables.sink_block, workspace, partial_lse, batch, pieces, sm_scale,
        K_STRIDE=cache.k_rows.stride(0), V_STRIDE=cache.v_rows.stride(0), KV_HEADS=kv_heads,
        PAGE=tables.page_size, **row_constants(cache), RING=max(windows.ring, 1),
        SINK_PARTS=sink_parts, PART=part, BLOCK_H=block_h,
        BLOCK_G=max(triton.next_power_of_2(gqa * queries), 8), BLOCK_W=BLOCK_W, **shared,
        num_warps=block_h, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    # Few query heads have many partials each: read more at a time, and share a head's channels among programs.
    per_request = triton.cdiv(pieces, batch) + sink_parts + ring_parts
    block = min(max(triton.next_power_of_2(per_request), 4), MERGED_AT_ONCE)
    block_d, heads, sets = head_dim, 1, 1
    if reading is not None:
        sets = reading.sets
        heads = min(triton.next_power_of_2(triton.cdiv(batch * rows, _processors(cache))), MOST_MERGED)
        block = min(block, MERGED_AT_ONCE // heads)
    elif batch * rows < 512:
        block_d = 32
    tiles = sets * triton.cdiv(batch * rows // sets, heads)
    merge_kernel[(tiles, head_dim // block_d)](
        workspace, partial_lse, out, out.stride(0), out.stride(1), partial_lse if lse is None else lse,
        out if reading is None else reading.terms, tables.kv_lens, tables.ring_start, batch, pieces, Q_HEADS=rows,
        D=head_dim, BLOCK=block, BLOCK_D=block_d, HAS_LSE=lse is not None, ROWS=heads, SETS=sets,
        TERMS=0 if reading is None else reading.count, R_SCALE=1.0 if reading is None else reading.scale,
        **shared, num_warps=min(max(heads * block * block_d // 1024, 1 if reading is None else 4), 4),
    )  # fmt: skip
    return out
