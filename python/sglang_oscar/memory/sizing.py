"""Hooks into SGLang's memory sizing: dtype, bytes per token, budget, number of requests, and the call for the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.attach import failure, gate, releases
from sglang_oscar.attention import extend_choice
from sglang_oscar.attention.scratch import scratch
from sglang_oscar.attention.workspace import Workspace
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.features.disaggregation.arguments import waiting_rows
from sglang_oscar.features.hybrids.sizing import state_slots
from sglang_oscar.features.sliding_windows.sizing import window_pool_of
from sglang_oscar.features.speculation import draft_model
from sglang_oscar.features.speculation.arguments import new_tokens
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.configurator import find_plan, geometry_of, keep_plan, plan_of
from sglang_oscar.memory.plan import make_plan
from sglang_oscar.memory.scratch import Scratch
from sglang_oscar.names import DTYPE, is_int2
from sglang_oscar.settings import of_this_process


def extend_workspace(configurator: Any, geometry: Geometry, budget_bytes: int) -> Workspace | None:
    """What extend takes of the budget; None where it needs nothing.

    Raises:
        Int2Error: the backend that is asked for cannot be had.
    """
    from sglang.srt.runtime_context import get_parallel

    layer, model = geometry.any_layer, configurator.model_config
    backend = extend_choice.choose(
        of_this_process().extend_backend, configurator.device, layer.head_dim, model.has_attention_sinks
    )
    if backend is None or backend == "triton":
        return None
    q_heads = model.num_attention_heads // get_parallel().attn_tp_size
    return extend_choice.workspace(backend, layer, q_heads, model.dtype, budget_bytes)


def decode_scratch(configurator: Any, geometry: Geometry, short_chunks: bool) -> Scratch | None:
    """What decode and verification take of the budget beside the cache; None where torch computes them.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        geometry: of this rank.
        short_chunks: whether the decode kernel reads prefixes of short chunks, too.
    """
    from sglang.srt.runtime_context import get_parallel

    if configurator.device != "cuda":
        return None
    model, ranks = configurator.model_config, get_parallel().attn_tp_size
    setting, drafts = of_this_process().decode_backend, new_tokens(releases.resolved(configurator.server_args))
    return scratch(
        geometry, setting, configurator.device, model.dtype, model.num_attention_heads // ranks, configurator.page_size,
        model.context_len, drafts, ranks, short_chunks,
    )  # fmt: skip


def around_configure_kv_cache_dtype(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Resolve ``int2`` to byte rows; first int2 step in a worker, so it also checks that all hooks are attached.

    A draft model's cache is not quantized: it has the type of the draft model.
    """
    if kwargs["server_args_kv_cache_dtype"] != DTYPE:
        return original(**kwargs)
    if kwargs["is_draft_worker"]:
        return "auto", kwargs["model_dtype"]
    from sglang.srt.runtime_context import get_server_args

    from oscar_cpu import window_attention
    from sglang_oscar.attention import backend

    if (reason := failure.reason()) is not None:
        fatal(f"int2 mode cannot attach to SGLang: {reason}")
    if not gate.has_passed(get_server_args()):
        fatal(gate.UNCHECKED)
    backend.register()
    if releases.model_config(get_server_args()).is_hybrid_swa:
        # What SGLang builds for layers with a window is in the model's dtype; the INT2 pool asks nobody.
        window_attention.register()
        return "auto", kwargs["model_dtype"]
    return DTYPE, torch.uint8


def around_compute_cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of one token in the history pool."""
    if not is_int2(kvc.server_args):
        return original(self, kvc, num_layers)
    try:
        return geometry_of(kvc).cell_bytes
    except Int2Error as error:
        fatal(error)


def after_pool_configurator(result: None, self: Any, kvc: Any) -> None:
    """Bytes of one token over all pools that it has a slot in.

    SGLang takes a draft layer to cost what a layer of the model does.
    """
    if is_int2(kvc.server_args) and not kvc.is_draft_worker:
        self._cell_size = geometry_of(kvc).cell_bytes + draft_model.cell_bytes_of(kvc.server_args)


def after_profile_available_bytes(available: int, self: Any, pre_model_load_memory: int) -> int | None:
    """Take the side buffers off the budget before the history pool is sized from it."""
    if not is_int2(self.server_args):
        return None
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    try:
        geometry = geometry_of(self)
        extend = extend_workspace(self, geometry, available)
        draft = draft_model.cell_bytes_of(self.server_args)
        waiting, states = waiting_rows(releases.resolved(self.server_args)), state_slots(self, geometry)
        # SGLang runs one request where it is told to run none.
        asked, windows = schedule.max_running_requests, window_pool_of(self)
        running = asked if asked is None else max(1, asked)
        beside = decode_scratch(self, geometry, extend is not None)
        plan = make_plan(geometry, available, running, self.page_size, extend, draft, waiting, states, windows, beside)
    except Int2Error as error:
        fatal(error)
    keep_plan(self, plan)
    return available - plan.fixed_bytes


def around_resolve_max_num_reqs(original: Callable[..., int], self: Any, token_capacity: int) -> int:
    """Admit no more requests than there are windows for."""
    limit = original(self, token_capacity)
    plan = find_plan(self)
    return limit if plan is None else min(limit, plan.max_running)


def after_post_capture_kv_sizing_planned(planned: bool, server_args: Any, /) -> bool | None:
    """Size the pool before graph capture: the alternative reserves address space that byte rows cannot use."""
    return False if is_int2(server_args) else None


def around_build_token_to_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Build the INT2 pool with its side buffers, and its cache object; of a draft model, SGLang's own pool."""
    if not is_int2(self.server_args):
        return original(self, **kwargs)
    from sglang_oscar.features.hybrids.pool import around_int2_pool
    from sglang_oscar.features.sliding_windows.pool import pair_with_windows
    from sglang_oscar.memory.build import build_pool, check_draft_pool

    if self.is_draft_worker:
        pool = original(self, **kwargs)
        try:
            check_draft_pool(pool, kwargs["req_to_token_pool"])
        except Int2Error as error:
            fatal(error)
        return pool

    try:
        plan = plan_of(self)
        pool = build_pool(self, plan, kwargs["sizes"], kwargs["req_to_token_pool"])
        if plan.windows is not None:
            return pair_with_windows(self, kwargs["sizes"], pool)
        return around_int2_pool(self, pool, kwargs["req_to_token_pool"])
    except Int2Error as error:
        fatal(error)
