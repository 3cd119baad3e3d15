"""Sizes of the two pools of a model with sliding windows."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.features.sliding_windows.window_pool import WindowPool, window_pool
from sglang_oscar.memory.part import Sizing
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.worker import of_this_process


def parts(sizing: Sizing) -> list[WindowPool]:
    """What the layers with a window of a worker's model need; nothing where there are none."""
    from sglang.srt.runtime_context import get_parallel

    configurator = sizing.configurator
    args = releases.resolved(configurator.server_args)
    chunks = 1 if args.disable_overlap_schedule else 2
    pool = window_pool(
        configurator.model_config,
        of_this_process(),
        configurator.sliding_window_size,
        get_parallel().attn_tp_size,
        configurator.page_size,
        chunks * args.chunked_prefill_size,
        2 * new_tokens(args),
        releases.window_ratio(args),
    )
    return [] if pool is None else [pool]


def pool_sizes(plan: MemoryPlan, tokens: int, page_size: int) -> dict[str, int]:
    """Sizes of both pools as SGLang's MemoryPoolConfig has them; nothing without windows.

    Args:
        plan: of the memory.
        tokens: of the INT2 pool, whole pages.
        page_size: tokens of a page.

    Raises:
        ValueError: the pool of windows would hold no request.
    """
    windows = plan.part(WindowPool)
    if windows is None:
        return {}
    own = windows.tokens(plan.requests, tokens)
    if own <= windows.window + page_size:
        raise ValueError(
            f"a window pool of {own} tokens holds no request (window {windows.window}, page {page_size}); raise "
            "--swa-full-tokens-ratio, --max-total-tokens or --mem-fraction-static"
        )
    return {"full_max_total_num_tokens": tokens, "swa_max_total_num_tokens": own}


def cache_dtype(model: Any, dtype: Any) -> tuple[str, Any] | None:
    """What SGLang builds for layers with a window is in the model's dtype; the INT2 pool asks nobody."""
    return ("auto", dtype) if model.is_hybrid_swa else None
