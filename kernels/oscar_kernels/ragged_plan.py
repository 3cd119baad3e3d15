"""Plans of extends that go through a workspace: index tensors on the device, and what the attention kernels plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from oscar_kernels.cache import BatchTables
from oscar_kernels.extend_plan import (
    QUERY_TILE,
    SHORT_BATCH,
    Decoding,
    ExtendPlan,
    Joined,
    Limits,
    Pass,
    Ragged,
    Short,
    Span,
    count_splits,
    cut_prefixes,
    cut_spans,
)
from oscar_kernels.format import AnyFormat
from oscar_kernels.joined_extend import is_joined, lengths_joined, rows_of_chunks
from oscar_kernels.spans import Spans


class RaggedPlanner:
    """Plans the extends of a model.

    Args:
        heads: a layer, all of its parts, whose kv heads and channels others have, too.
        q_heads: query heads of this rank.
        dtype: of queries, keys and values, bfloat16 or float16.
        limits: size and number of workspace loads, and what is read without it.
        device: where the cache is.
        attention: makes an attention kernel; called once for chunks and joined batches (``chunk``) and once for each
            pass of prefixes.
        processors: multiprocessors that a pass is to fill; 1 where the attention kernel splits keys itself.
    """

    def __init__(
        self,
        heads: AnyFormat,
        q_heads: int,
        dtype: torch.dtype,
        limits: Limits,
        device: torch.device,
        attention: Callable[[], Ragged],
        processors: int = 1,
    ) -> None:
        self._heads, self.q_heads, self._dtype, self._device = heads, q_heads, dtype, device
        self.limits, self._attention, self._processors = limits, attention, processors
        self.chunk = attention()
        self._prefixes: list[Ragged] = []
        self._planned: torch.cuda.Event | None = None

    def new_workspace(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for keys and for values of a load: [capacity, kv_heads, head_dim] each, of one tensor."""
        heads, rows = self._heads, self.limits.capacity * self._heads.kv_heads
        room = torch.empty(rows * (heads.head_dim + heads.value_head_dim), dtype=self._dtype, device=self._device)
        keys, values = room.split([rows * heads.head_dim, rows * heads.value_head_dim])
        shape = (self.limits.capacity, heads.kv_heads)
        return keys.view(*shape, heads.head_dim), values.view(*shape, heads.value_head_dim)

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
        cut = cut_prefixes(prefix_lens, chunk_lens, self.limits)
        if is_joined(prefix_lens, chunk_lens, cut, self.limits, self.q_heads, self._processors):
            joined = self._plan_joined(prefix_lens, chunk_lens, starts)
            self._note_planned()
            return ExtendPlan(int(starts[-1]), [], [], None, None, joined)
        self.plan_chunks(chunk_lens)
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
        self._note_planned()
        return ExtendPlan(int(starts[-1]), passes, short, in_place, decoding)

    def plan_chunks(self, lengths: list[int]) -> None:
        """Plan attention of chunks of so many tokens to themselves."""
        starts = _indptr(lengths)
        self._plan_attention(self.chunk, starts, starts, causal=True)

    def _note_planned(self) -> None:
        if self._device.type == "cuda":
            self._planned = torch.cuda.Event()
            self._planned.record()

    def _plan_joined(self, prefix_lens: list[int], chunk_lens: list[int], starts: torch.Tensor) -> Joined:
        indptr = _indptr(lengths_joined(prefix_lens, chunk_lens))
        self._plan_attention(self.chunk, starts, indptr, causal=True)
        requests = torch.arange(len(chunk_lens), dtype=torch.int32)
        return Joined(
            Spans(*map(self._upload, (requests, torch.zeros_like(requests), indptr))),
            chunk_rows=self._upload(rows_of_chunks(prefix_lens, chunk_lens, indptr)),
            rows=int(indptr[-1]),
        )

    def _plan_pass(self, attention: Ragged, spans: list[Span], starts: torch.Tensor) -> Pass:
        first, last = spans[0].request, spans[-1].request + 1
        own = starts[first : last + 1]
        chunks = (own[1:] - own[:-1]).tolist()
        tiles = sum(-(-chunk // QUERY_TILE) for chunk in chunks)
        splits = count_splits(tiles * self.q_heads, self._processors, max(span.end - span.begin for span in spans))
        pieces = cut_spans(spans, splits)
        lengths = [0] * (splits * (last - first))
        for number, piece in enumerate(pieces):
            lengths[number // len(spans) * (last - first) + piece.request - first] = piece.end - piece.begin
        self._plan_attention(attention, _indptr(chunks * splits), _indptr(lengths), causal=False)
        indptr = _indptr([piece.end - piece.begin for piece in pieces])
        columns = [piece.request for piece in pieces], [piece.begin for piece in pieces]
        # Each has a tensor of its own: Triton compiles a kernel anew for pointers that are aligned in another way.
        requests, begins = (self._upload(torch.tensor(column, dtype=torch.int32)) for column in columns)
        load = Spans(requests, begins, self._upload(indptr))
        return Pass(attention, load, int(indptr[-1]), slice(int(own[0]), int(own[-1])), splits)

    def _plan_short(
        self, tables: BatchTables, prefix_lens: list[int], requests: list[int], starts: torch.Tensor
    ) -> list[Short]:
        # Rows of the page table are copied once per token: no wider than these prefixes need.
        pages = -(-max(prefix_lens[request] for request in requests) // tables.page_size)
        tables = replace(tables, page_table=tables.page_table[:, :pages])
        bounds = starts.tolist()
        pairs = [(request, token) for request in requests for token in range(bounds[request], bounds[request + 1])]
        index = self._upload(torch.tensor(pairs, dtype=torch.int64).T.contiguous())
        # In parts alike: one of a single token would need decode kernels of its own.
        count = -(-len(pairs) // SHORT_BATCH)
        parts = zip(*(rows.tensor_split(count) for rows in index), strict=True)
        return [Short(tokens, _select(tables, own)) for own, tokens in parts]

    def _plan_decoding(self, tables: BatchTables, requests: list[int], starts: torch.Tensor) -> Decoding:
        index = torch.tensor(requests, dtype=torch.int64)
        own, tokens = self._upload(torch.stack([index, starts[index].long()]))
        selected = _select(tables, own)
        return Decoding(tokens, replace(selected, kv_lens=selected.kv_lens + 1))

    def _plan_attention(
        self, attention: Ragged, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, causal: bool
    ) -> None:
        if self._device.type == "cuda":
            # Copies to the device then wait for nothing.
            qo_indptr, kv_indptr = qo_indptr.pin_memory(), kv_indptr.pin_memory()
        attention.plan(
            qo_indptr, kv_indptr, self.q_heads, self._heads.kv_heads, self._heads.head_dim,
            head_dim_vo=self._heads.value_head_dim, causal=causal, q_data_type=self._dtype,
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
