"""Attention of a model with sliding windows: layers without a window read the INT2 cache, the others SGLang's own.

The stock backend is the one that SGLang chose, under its own name: some models insist on certain names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from oscar_kernels.sliding_window import attend
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.sink_refill import Refill


def around_wrapper(original: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """Put the INT2 cache beside the backend that SGLang has built for a model with sliding windows."""
    cache = cache_of(runner.token_to_kv_pool)
    stock = original(runner, full_attn_backend)
    if cache is None or cache.plan.part(WindowPool) is None or runner.is_draft_worker:
        return stock
    return WindowsBesideInt2(OscarAttentionBackend(runner), stock)


class WindowsBesideInt2(AttentionBackend):
    """Asks one of two backends, by layer.

    Args:
        int2: of layers that attend to everything.
        stock: of layers with a sliding window.
    """

    def __init__(self, int2: OscarAttentionBackend, stock: AttentionBackend) -> None:
        super().__init__()
        self.int2, self.stock = int2, stock
        self.token_to_kv_pool, self.req_to_token_pool = int2.token_to_kv_pool, int2.req_to_token_pool
        self.attn_backend_list = [int2, stock]
        self.extend_dummy_seqs_capped_by_req_pool = getattr(stock, "extend_dummy_seqs_capped_by_req_pool", False)
        self.needs_cpu_seq_lens, self.max_context_len = stock.needs_cpu_seq_lens, int2.max_context_len
        self._refilling = False

    @contextmanager
    def refilling(self, refills: Sequence[Refill]) -> Iterator[None]:
        """As :meth:`OscarAttentionBackend.refilling`: a pass over the first tokens of prompts, that writes nothing but
        sink blocks. Layers with a window attend within it, and leave their pool alone."""
        self._refilling = True
        try:
            with self.int2.refilling(refills):
                yield
        finally:
            self._refilling = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare both."""
        self.int2.init_forward_metadata(forward_batch)
        if not self._refilling:
            self.stock.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare both for a graph."""
        self.int2.init_forward_metadata_out_graph(forward_batch, in_capture)
        self.stock.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What either records."""
        self.int2.init_forward_metadata_in_graph(forward_batch)
        self.stock.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate fixed tables of both."""
        self.int2.init_cuda_graph_state(max_bs, max_num_tokens)
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what warming up has done to the stock backend."""
        self.stock.on_after_cuda_graph_warmup()

    @property
    def verify_mask(self) -> Any:
        """How to lay out the mask of a step's new tokens, for the stock backend: ours reads none of chains."""
        return self.stock.verify_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded rows."""
        return self.int2.get_cuda_graph_seq_len_fill_value()

    def support_triton(self) -> bool:
        """Whether the stock backend lets SGLang use Triton."""
        return bool(self.stock.support_triton())

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One token per request; returns [tokens, q_heads * v_head_dim] in the dtype of ``q``."""
        return self._of(layer).forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[no-any-return]

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """A chunk per request; returns [tokens, q_heads * v_head_dim] in the dtype of ``q``."""
        backend = self._of(layer)
        if self._refilling and backend is self.stock:
            return attend_within(q, k, v, layer, forward_batch.extend_seq_lens_cpu, kwargs.get("sinks"))
        return backend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[no-any-return]

    def _of(self, layer: Any) -> AttentionBackend:
        return self.int2 if layer.layer_id in self.int2.cache.layers else self.stock


def attend_within(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, lengths: list[int], sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of whole prompts of a few tokens in a layer with a window, without a cache.

    Args:
        q, k, v: of all prompts one after the other, as a layer gets them.
        layer: the RadixAttention.
        lengths: tokens of each; what lies behind them is padding and comes back as zeros.
        sinks: sink logits of the layer; None for a model without.

    Returns:
        [tokens, q_heads * v_head_dim] in the dtype of ``q``.
    """
    queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
    keys = k.view(-1, layer.tp_k_head_num, layer.head_dim)
    values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
    out, begin = queries.new_zeros(*queries.shape[:2], layer.v_head_dim), 0
    for length in lengths:
        own = slice(begin, begin + length)
        found = attend(queries[own], keys[own], values[own], layer.scaling, layer.sliding_window_size, sinks)
        out[own] = found.to(out.dtype)
        begin += length
    return out.flatten(1)
