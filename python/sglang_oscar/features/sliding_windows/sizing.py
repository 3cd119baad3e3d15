"""Sizes of the two pools of a model with sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from sglang_oscar.attach import releases
from sglang_oscar.features.sliding_windows.plan import WindowPool, window_pool
from sglang_oscar.memory.configurator import plan_of
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.names import is_int2
from sglang_oscar.settings import of_this_process


class WindowConfigurator(MemoryPoolConfigurator):
    """Sizes by a memory plan: the INT2 pool gets what windows leave.

    Args:
        plan: of the memory of a model with sliding windows.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Sizes from a budget in bytes, which what the plan calls fixed is not part of."""
        return self.calculate_pool_sizes_from_max_tokens(int(available_bytes // self.plan.token_bytes), page_size)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        """Sizes from the tokens of the INT2 pool.

        Raises:
            ValueError: the pool of windows would hold no request; as SGLang says it.
        """
        windows = self.plan.windows
        assert windows is not None
        full = max_total_num_tokens // page_size * page_size
        tokens = windows.tokens(self.plan.max_running, full)
        if tokens <= windows.window + page_size:
            raise ValueError(
                f"a window pool of {tokens} tokens holds no request (window {windows.window}, page {page_size}); raise "
                "--swa-full-tokens-ratio, --max-total-tokens or --mem-fraction-static"
            )
        return MemoryPoolConfig(
            max_total_num_tokens=full, full_max_total_num_tokens=full, swa_max_total_num_tokens=tokens
        )


def window_pool_of(configurator: Any) -> WindowPool | None:
    """What the layers with a window of a worker's model need; None where there are none.

    Args:
        configurator: SGLang's KVCacheConfigurator.
    """
    from sglang.srt.runtime_context import get_parallel

    args = releases.resolved(configurator.server_args)
    chunks = 1 if args.disable_overlap_schedule else 2
    return window_pool(
        configurator.model_config,
        of_this_process(),
        configurator.sliding_window_size,
        get_parallel().attn_tp_size,
        configurator.page_size,
        chunks * args.chunked_prefill_size,
        releases.window_ratio(args),
    )


def around_create_configurator(original: Callable[[Any], Any], kvc: Any) -> Any:
    """Size the pools of a model with windows in int2 mode by its plan."""
    if not is_int2(kvc.server_args) or kvc.is_draft_worker or not kvc.model_config.is_hybrid_swa:
        return original(kvc)
    return WindowConfigurator(plan_of(kvc))
