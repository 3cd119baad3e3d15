"""The attention backend ``oscar``: stores rotated INT2 rows and BF16 windows, and attends over them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel

from oscar_kernels.cache import StoreSlots
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.attention import compiled, layer_attention
from sglang_oscar.attention.batch import Batch, DecodeTables, extend_batch, largest_batch, refill_batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.key_errors import KeyErrors
from sglang_oscar.attention.query_heads import query_heads
from sglang_oscar.attention.verification import unread_mask
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.sink_refill import Refill
from sglang_oscar.names import BACKEND

logger = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to SGLang under its name."""
    ATTENTION_BACKENDS[BACKEND] = OscarAttentionBackend


class OscarAttentionBackend(AttentionBackend):
    """Attention over the INT2 cache.

    Args:
        model_runner: SGLang's model runner, its pools built.

    Raises:
        Int2Error: the pools are not those of int2 mode.
    """

    q_heads: int
    """Query heads of a layer on this rank, for which kernels are compiled."""

    has_sink_logits = False
    """Whether layers of the model come with sink logits (:mod:`oscar_kernels.sink_logits`)."""

    key_errors: KeyErrors | None = None
    """What measures errors of keys, where that is asked for."""

    needs_cpu_seq_lens = False
    """SGLang waits for the verification of a step before it prepares the next one where a backend asks for lengths on
    the host. Tables are filled from those on the device."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        cache = cache_of(model_runner.token_to_kv_pool)
        if cache is None:
            raise Int2Error("the attention backend oscar needs --kv-cache-dtype int2")
        # SGLang reads both pools off the backend (forward_context.py).
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.cache = cache
        self.key_errors = KeyErrors(cache) if cache.settings.key_errors else None
        self.has_sink_logits = model_runner.model_config.has_attention_sinks
        server_args = releases.resolved(model_runner.server_args)
        self.new_tokens = new_tokens(server_args)
        self._verify_mask = unread_mask(server_args, cache.seats.device)
        # SGLang sizes a mask with it where it knows no lengths on the host.
        self.max_context_len = model_runner.model_config.context_len
        try:
            ranks = get_parallel().attn_tp_size
            q_heads = self.q_heads = query_heads(model_runner.model, cache.layers)
            self.kernels = layer_attention.for_device(
                cache, model_runner.dtype, q_heads, self.new_tokens, largest_batch(cache, ranks), self.has_sink_logits,
                server_args.cuda_graph_config.decode.bs or (),
            )  # fmt: skip
        except Int2Error as error:
            fatal(error)
        if server_args.enable_torch_compile:
            compiled.prepare()
            largest = server_args.torch_compile_max_bs
            logger.info("int2 decode: one operator per layer inside torch.compile, up to %d requests", largest)
        self.batch: Batch | None = None
        self.graph_tables: DecodeTables | None = None
        self._refilled: Sequence[Refill] | None = None

    @contextmanager
    def refilling(self, refills: Sequence[Refill]) -> Iterator[None]:
        """While inside, an extend computes the sinks of these blocks and touches nothing of requests in seats."""
        self._refilled = refills
        try:
            yield
        finally:
            self._refilled = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the batch's tables for an eager forward pass."""
        if self._refilled is not None:
            batch = refill_batch(self.cache, self._refilled)
            self.batch = replace(batch, extend_plan=self.kernels.plan_extend(batch))
        elif forward_batch.forward_mode.is_idle():
            self.batch = None
        elif forward_batch.forward_mode.is_decode():
            longest = self._longest(forward_batch)
            tables = DecodeTables(self.cache, forward_batch.batch_size, longest)
            self.batch = tables.fill(forward_batch, longest)
        elif forward_batch.forward_mode.is_target_verify():
            longest = self._longest(forward_batch)
            tables = DecodeTables(self.cache, forward_batch.batch_size, longest, self.new_tokens)
            self.batch = tables.fill(forward_batch, longest)
        else:
            keeper = self.cache.kept
            if keeper is not None:
                keeper.await_loaded()
            self.cache.seats.upload()
            kept = None if keeper is None else keeper.keep_chunk(forward_batch)
            batch = extend_batch(self.cache, forward_batch)
            measured = self.key_errors is not None and self.key_errors.begin(batch.tokens)
            sampled = self.cache.sampler is not None and self.cache.sampler.begin(forward_batch)
            plan = self.kernels.plan_extend(batch)
            self.batch = replace(batch, extend_plan=plan, kept=kept, measured=measured, sampled=sampled)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Refresh the fixed tables that a graph of decode or verification reads."""
        mode = forward_batch.forward_mode
        if not (mode.is_target_verify() if self.new_tokens else mode.is_decode()):
            return self.init_forward_metadata(forward_batch)
        assert self.graph_tables is not None
        if self.new_tokens:
            self.batch = self.graph_tables.prepare(forward_batch)
        else:
            self.batch = self.graph_tables.fill(forward_batch, self._longest(forward_batch))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record the rest of verification's tables, for any lengths: the host is what a step with drafts waits for."""
        if self.new_tokens and forward_batch.forward_mode.is_target_verify():
            assert self.graph_tables is not None
            self.graph_tables.write(forward_batch, self.req_to_token_pool.req_to_token.shape[1])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the fixed tables."""
        self.graph_tables = DecodeTables(self.cache, max_bs, drafts=self.new_tokens)

    @property
    def verify_mask(self) -> Any:
        """How SGLang is to lay out the mask of a step's new tokens; None where it decides."""
        return self._verify_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding: one token, in the dummy seat, page and block 0."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value
    """SGLang asks this one on a CPU, also where ranks pad their batches for each other."""

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
        call = self._checked_call(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        return compiled.decode(*call) if torch.compiler.is_compiling() else self.decode(call)

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
        """A chunk per request, or the new tokens that are verified; returns [tokens, q_heads * v_head_dim] in the
        dtype of ``q``.

        Where ranks exchange activations SGLang pads a batch to a multiple of their number. Rows behind the real tokens
        are neither attended to nor stored, and come back as zeros.
        """
        call = self._checked_call(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        assert self.batch is not None
        attend = self.kernels.extend if self.batch.visible is None else self.kernels.verify
        tokens = self.batch.tokens
        if len(call.q) == tokens:
            return self._attend(attend, call)
        out = q.new_zeros(len(call.q), call.q.shape[1] * call.v.shape[2])
        out[:tokens] = self._attend(attend, call.first(tokens))
        return out

    def decode(self, call: Call) -> torch.Tensor:
        """:meth:`forward_decode` of a checked call; see :func:`sglang_oscar.attention.compiled.decode`."""
        return self._attend(self.kernels.decode, call)

    def _attend(self, attend: Any, call: Call) -> torch.Tensor:
        assert self.batch is not None
        slots = StoreSlots(call.out_cache_loc, self.batch.slots.ring, self.batch.slots.sink)
        layer, batch = self.cache.layers[call.layer_id], replace(self.batch, slots=slots)
        self._wait_for_rows(call.layer_id)
        out = attend(layer, batch, call)
        if batch.kept is not None:
            slots = replace(batch.kept, row=call.out_cache_loc)
            for part, own in call.apart(layer):
                self.kernels.store(part, slots, own.k, own.v)
        if batch.measured and self.key_errors is not None:
            self.key_errors.add(call, batch.tokens)
        if batch.sampled and self.cache.sampler is not None:
            self.cache.sampler.add(call)
        return out.to(call.q.dtype).view(call.q.shape[0], -1)

    def _wait_for_rows(self, layer_id: int) -> None:
        """Wait until the host tier has brought this layer's rows, as stock does where a backend asks the pool for them.

        The pool that SGLang gave out is asked: one that holds others keeps the counter for all of them. Of ours a part
        of a layer is counted like a layer.
        """
        pool = self.token_to_kv_pool
        if pool.layer_transfer_counter is not None:
            ours = isinstance(pool, Int2TokenToKVPool)
            for number in pool.numbers(layer_id) if ours else [layer_id - pool.start_layer]:
                pool.layer_transfer_counter.wait_until(number)

    def _longest(self, forward_batch: Any) -> int:
        """Upper bound of the batch's lengths, from SGLang's host copy where it keeps one."""
        if forward_batch.seq_lens_cpu is not None:
            return int(forward_batch.seq_lens_cpu.max())
        return self.req_to_token_pool.req_to_token.shape[1]

    def _checked_call(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> Call:
        known = {"sinks"} if self.has_sink_logits else set()
        unknown = sorted(name for name, value in extras.items() if value is not None and name not in known)
        if k is None or not save_kv_cache or unknown:
            what = f"{', '.join(unknown)}" if unknown else "attention that does not store its keys and values"
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what} (layer {layer.layer_id})")
        if layer.tp_q_head_num != self.q_heads:  # kernels for other groups would answer, and wrongly
            raise Int2Error(
                f"int2 kernels are compiled for {self.q_heads} query heads, layer {layer.layer_id} has "
                f"{layer.tp_q_head_num}"
            )
        return Call(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            forward_batch.out_cache_loc,
            layer.layer_id,
            layer.scaling,
            extras.get("sinks"),
        )
