"""Extend with a stock 16-bit attention kernel: the chunk as it is, the cached prefix from a bounded workspace.

The chunk of every request is attended to exactly, with the model's own keys and values and a causal mask. Prefixes
are dequantized into a workspace of fixed size, in the rotated basis, and attended to with rotated queries; what does
not fit at once is done in several passes. Chunks of few tokens are not worth that: the decode kernel takes each token
as a request whose cache is the prefix. What is too much for the passes is read in place by the Triton extend kernel.
All results are merged by their log-sum-exp. Chunks of one token, which are requests that decode within a mixed batch,
are left to the caller, who stores them and decodes.

The attention kernel is FlashInfer's ragged prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from oscar_kernels.cache import BatchTables, LayerCache
from oscar_kernels.extend_plan import (
    QUERY_TILE,
    SHORT_BATCH,
    Decode,
    Decoding,
    ExtendPlan,
    Limits,
    Pass,
    Ragged,
    Short,
    Span,
    count_splits,
    cut_prefixes,
    cut_spans,
)
from oscar_kernels.layout import RowLayout
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.merge_states import merge_states_
from oscar_kernels.triton.prefix import copy_prefixes


class RaggedExtend:
    """Plans and runs the extends of a model: chunks, passes of dequantized prefixes, short chunks, and their merge.

    Args:
        layout: of the cache.
        q_heads: query heads of this rank.
        dtype: of queries, keys and values, bfloat16 or float16.
        limits: size and number of workspace loads, and what is read without it.
        device: where the cache is.
        attention: makes an attention kernel; called once for chunks and once for each pass of prefixes.
        decode: decode kernel for up to SHORT_BATCH requests.
        processors: multiprocessors that a pass is to fill; 1 where the attention kernel splits keys itself.
    """

    def __init__(
        self,
        layout: RowLayout,
        q_heads: int,
        dtype: torch.dtype,
        limits: Limits,
        device: torch.device,
        attention: Callable[[], Ragged],
        decode: Decode,
        processors: int = 1,
    ) -> None:
        self._layout, self._q_heads, self._dtype, self._device = layout, q_heads, dtype, device
        self.limits, self._attention, self._processors, self._decode = limits, attention, processors, decode
        self._workspace = torch.empty(2, limits.capacity, layout.kv_heads, layout.head_dim, dtype=dtype, device=device)
        self._chunk = attention()
        self._prefixes: list[Ragged] = []
        self._planned: torch.cuda.Event | None = None

    def plan(self, tables: BatchTables, prefix_lens: list[int], chunk_lens: list[int]) -> ExtendPlan:
        """Decide how a batch is worked on; once per forward pass, valid until the next call.

        Args:
            tables: the batch; ``kv_lens`` on the device equals ``prefix_lens``. The page table covers the first token
                of every chunk, too.
            prefix_lens: cached tokens before the chunk, per request.
            chunk_lens: new tokens per request.
        """
        if self._planned is not None:
            # The kernels' plans are copied from host buffers that the next plan overwrites. The last ones were
            # queued a forward pass ago: as a rule there is nothing to wait for.
            self._planned.synchronize()
        starts = _indptr(chunk_lens)
        self._plan_attention(self._chunk, starts, starts, causal=True)
        cut = cut_prefixes(prefix_lens, chunk_lens, self.limits)
        while len(self._prefixes) < len(cut.passes):
            self._prefixes.append(self._attention())
        passes = [self._plan_pass(*load, starts) for load in zip(self._prefixes, cut.passes, strict=False)]
        in_place = None
        if cut.in_place:
            lengths = torch.zeros(len(prefix_lens), dtype=torch.int32)
            lengths[cut.in_place] = torch.tensor([prefix_lens[request] for request in cut.in_place], dtype=torch.int32)
            in_place = replace(tables, kv_lens=self._upload(lengths))
        short = self._plan_short(tables, prefix_lens, cut.short, starts) if cut.short else []
        decoding = self._plan_decoding(tables, cut.single, starts) if cut.single else None
        if self._device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()
        return ExtendPlan(int(starts[-1]), passes, short, in_place, decoding)

    def warm_up(self) -> None:
        """Plan and run a chunk of one token: whatever the attention kernel compiles or loads, it does here."""
        layout = self._layout
        starts = _indptr([1])
        self._plan_attention(self._chunk, starts, starts, causal=True)
        q, k, v = (
            torch.zeros(1, heads, layout.head_dim, dtype=self._dtype, device=self._device)
            for heads in (self._q_heads, layout.kv_heads, layout.kv_heads)
        )
        self._chunk.forward_return_lse(q, k, v, causal=True, sm_scale=1.0)

    def run(
        self,
        plan: ExtendPlan,
        cache: LayerCache,
        tables: BatchTables,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_rot: torch.Tensor | None,
        sm_scale: float,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the planned batch in one layer, before its chunks are stored.

        Args:
            plan: of this forward pass.
            cache: the layer's cache, without the chunks.
            tables: the batch.
            q: [tokens, q_heads, head_dim], not rotated.
            k, v: [tokens, kv_heads, head_dim]; ``k`` not rotated, ``v`` in the basis of the cached values unless
                nothing is cached.
            qo_indptr: int32 [batch + 1], first token of every chunk, then the number of tokens; on the device.
            q_rot: ``q`` rotated; None only where ``plan.has_prefix`` is false.
            sm_scale: factor on the logits.
            lse: float32 [tokens, q_heads]; takes the log2 of the sum of exp2 of the logits (times log2 e). None for
                nothing.

        Returns:
            [tokens, q_heads, head_dim] in the basis of ``v``; of ``plan.decoding``, without the prefix.
        """
        if not plan.has_prefix and lse is None:
            return self._chunk.forward(q, k, v, causal=True, sm_scale=sm_scale)
        out, sums = self._chunk.forward_return_lse(q, k, v, causal=True, sm_scale=sm_scale)
        if plan.has_prefix:
            assert q_rot is not None
            self._add_prefixes(plan, cache, tables, out, sums, qo_indptr, q_rot, sm_scale)
        if lse is not None:
            lse.copy_(sums)
        return out

    def _add_prefixes(
        self,
        plan: ExtendPlan,
        cache: LayerCache,
        tables: BatchTables,
        out: torch.Tensor,
        lse: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_rot: torch.Tensor,
        sm_scale: float,
    ) -> None:
        """Merge what is cached before the chunks into their attention to themselves, in place."""
        for load in plan.passes:
            keys, values = self._workspace[:, : load.rows]
            copy_prefixes(cache, tables, load.requests, load.begins, load.indptr, keys, values)
            queries = q_rot[load.tokens].repeat(load.splits, 1, 1) if load.splits > 1 else q_rot[load.tokens]
            parts = load.attention.forward_return_lse(queries, keys, values, causal=False, sm_scale=sm_scale)
            for part in zip(*(x.chunk(load.splits) for x in parts), strict=True):
                merge_states_(out[load.tokens], lse[load.tokens], *part)
        for short in plan.short:
            own, own_lse = out[short.tokens], lse[short.tokens]
            part_lse = torch.empty_like(own_lse)
            part_out = self._decode(cache, short.tables, q_rot[short.tokens], sm_scale, lse=part_lse)
            merge_states_(own, own_lse, part_out, part_lse)
            out[short.tokens], lse[short.tokens] = own, own_lse
        if plan.in_place is not None:
            part_lse = torch.empty_like(lse)
            part_out = extend(
                cache, plan.in_place, q_rot, None, None, qo_indptr, q_rot, sm_scale, lse=part_lse, prefix_only=True
            )
            merge_states_(out, lse, part_out, part_lse)

    def _plan_pass(self, attention: Ragged, spans: list[Span], starts: torch.Tensor) -> Pass:
        first, last = spans[0].request, spans[-1].request + 1
        own = starts[first : last + 1]
        chunks = (own[1:] - own[:-1]).tolist()
        tiles = sum(-(-chunk // QUERY_TILE) for chunk in chunks)
        splits = count_splits(tiles * self._q_heads, self._processors, max(span.end - span.begin for span in spans))
        pieces = cut_spans(spans, splits)
        lengths = [0] * (splits * (last - first))
        for number, piece in enumerate(pieces):
            lengths[number // len(spans) * (last - first) + piece.request - first] = piece.end - piece.begin
        self._plan_attention(attention, _indptr(chunks * splits), _indptr(lengths), causal=False)
        indptr = _indptr([piece.end - piece.begin for piece in pieces])
        table = torch.tensor([(piece.request, piece.begin) for piece in pieces], dtype=torch.int32).T.contiguous()
        requests, begins = self._upload(table)
        tokens = slice(int(own[0]), int(own[-1]))
        return Pass(attention, requests, begins, self._upload(indptr), int(indptr[-1]), tokens, splits)

    def _plan_short(
        self, tables: BatchTables, prefix_lens: list[int], requests: list[int], starts: torch.Tensor
    ) -> list[Short]:
        # Rows of the page table are copied once per token: no wider than these prefixes need.
        pages = -(-max(prefix_lens[request] for request in requests) // tables.page_size)
        tables = replace(tables, page_table=tables.page_table[:, :pages])
        bounds = starts.tolist()
        pairs = [(request, token) for request in requests for token in range(bounds[request], bounds[request + 1])]
        index = self._upload(torch.tensor(pairs, dtype=torch.int64).T.contiguous())
        parts = zip(*(rows.split(SHORT_BATCH) for rows in index), strict=True)
        return [Short(tokens, _select(tables, own)) for own, tokens in parts]

    def _plan_decoding(self, tables: BatchTables, requests: list[int], starts: torch.Tensor) -> Decoding:
        index = torch.tensor(requests, dtype=torch.int64)
        own, tokens = self._upload(torch.stack([index, starts[index].long()]))
        selected = _select(tables, own)
        return Decoding(tokens, replace(selected, kv_lens=selected.kv_lens + 1))

    def _plan_attention(
        self, attention: Ragged, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, causal: bool
    ) -> None:
        layout = self._layout
        if self._device.type == "cuda":
            # Copies to the device then wait for nothing.
            qo_indptr, kv_indptr = qo_indptr.pin_memory(), kv_indptr.pin_memory()
        attention.plan(
            qo_indptr, kv_indptr, self._q_heads, layout.kv_heads, layout.head_dim, causal=causal,
            q_data_type=self._dtype,
        )  # fmt: skip

    def _upload(self, x: torch.Tensor) -> torch.Tensor:
        return x.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else x


def _select(tables: BatchTables, requests: torch.Tensor) -> BatchTables:
    """Tables of some requests of a batch; a request may occur several times."""
    names = ("page_table", "kv_lens", "ring_row", "ring_start", "sink_block")
    return replace(tables, **{name: getattr(tables, name)[requests] for name in names})


def _indptr(lengths: list[int]) -> torch.Tensor:
    """int32 [n + 1] on the host: running sums of ``lengths``, from 0."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return starts
