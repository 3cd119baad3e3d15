"""Attention of models with sliding windows and sink logits on a machine without a GPU.

SGLang's own in torch knows no sink logits, and reads the pool of windows at the slots of the other one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from oscar_kernels.sliding_window import attend
from oscar_kernels.visible import mask_of
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.attention.verification import unread_mask, visible_words
from sglang_oscar.features.sliding_windows.models import CPU_BACKENDS


def register() -> None:
    """Answer to the names of SGLang's backends for CPUs, on a machine without a GPU."""
    from sglang.srt.utils import is_cpu

    if is_cpu():
        ATTENTION_BACKENDS.update(dict.fromkeys(CPU_BACKENDS, WindowAttention))


class WindowAttention(AttentionBackend):
    """Every layer in torch: windows and sink logits of a layer as the model asks for them.

    Args:
        model_runner: SGLang's model runner, its pools built.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        server_args = releases.resolved(model_runner.server_args)
        self.new_tokens = new_tokens(server_args)
        self._verify_mask = unread_mask(server_args, torch.device("cpu"))

    @property
    def verify_mask(self) -> Any:
        """How SGLang is to lay out the mask of a step's new tokens; None where it decides."""
        return self._verify_mask

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to prepare."""

    def support_triton(self) -> bool:
        """Triton needs a GPU."""
        return False

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """One token per request; returns [tokens, q_heads * v_head_dim] in the dtype of ``q``."""
        lengths = [1] * forward_batch.batch_size
        return self._forward(q, k, v, layer, forward_batch, lengths, save_kv_cache, **kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """A chunk per request, or the new tokens that are verified; returns [tokens, q_heads * v_head_dim] in the dtype
        of ``q``."""
        if forward_batch.forward_mode.is_target_verify():
            lengths = [self.new_tokens] * forward_batch.batch_size
        else:
            lengths = forward_batch.extend_seq_lens.tolist()
        return self._forward(q, k, v, layer, forward_batch, lengths, save_kv_cache, **kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        lengths: list[int],
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool, window = self.token_to_kv_pool, layer.sliding_window_size
        window = None if window in (None, -1) else window
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save_kv_cache:
            keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            slots = forward_batch.out_cache_loc
            pool.set_kv_buffer(layer, KVWriteLoc(slots, window_slots(pool, slots)), keys, values)
        k_buffer, v_buffer = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        out, begin = queries.new_zeros(*queries.shape[:2], layer.v_head_dim), 0
        rows, kv_lens = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        visible: list[torch.Tensor | None] = [None] * len(rows)
        if forward_batch.forward_mode.is_target_verify():
            # Lengths are those before the new tokens.
            kv_lens = [kv_len + self.new_tokens for kv_len in kv_lens]
            visible = [*mask_of(visible_words(forward_batch.spec_info, forward_batch.seq_lens, self.new_tokens))]
        for row, kv_len, length, seen in zip(rows, kv_lens, lengths, visible, strict=True):
            # What lies before the first query's window may be somebody else's by now.
            first = 0 if window is None else max(kv_len - length - window, 0)
            slots = self.req_to_token_pool.req_to_token[row, first:kv_len].long()
            if window is not None and (translated := window_slots(pool, slots)) is not None:
                slots = translated
            chunk = queries[begin : begin + length]
            result = attend(chunk, k_buffer[slots], v_buffer[slots], layer.scaling, window, sinks, seen)
            out[begin : begin + length] = result.to(out.dtype)
            begin += length
        return out.flatten(1)


def window_slots(pool: Any, slots: torch.Tensor) -> torch.Tensor | None:
    """Slots of the pool of windows that belong to slots of the other; None where all layers have one pool."""
    return pool.translate_loc_from_full_to_swa(slots) if isinstance(pool, SWAKVPool) else None
