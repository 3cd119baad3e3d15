"""SGLang's memory sizing in int2 mode: dtype, pool sizes, number of requests, and the call for the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig, MemoryPoolConfigurator

from sglang_oscar.attach import failure, gate, releases
from sglang_oscar.attach.arguments import replicas
from sglang_oscar.attach.feature import features
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.formats.drafts import OF_MODEL
from sglang_oscar.memory.build import build_pool, check_draft_pool
from sglang_oscar.memory.configurator import geometry_of, has_cut_layers, keep_plan, plan_of
from sglang_oscar.memory.part import Sizing
from sglang_oscar.memory.plan import MemoryPlan, make_plan
from sglang_oscar.names import DTYPE, is_int2


def around_configure_kv_cache_dtype(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Resolve ``int2`` to byte rows; first int2 step in a worker, so it also checks that all hooks are attached.

    A draft model's cache is SGLang's own: it has the type of the draft model, or that which the operator names.
    """
    if kwargs["server_args_kv_cache_dtype"] != DTYPE:
        return original(**kwargs)
    if kwargs["is_draft_worker"]:
        named = kwargs.get("speculative_draft_kv_cache_dtype") not in OF_MODEL
        return original(**kwargs) if named else ("auto", kwargs["model_dtype"])
    from sglang.srt.runtime_context import get_server_args

    if (reason := failure.reason()) is not None:
        fatal(f"int2 mode cannot attach to SGLang: {reason}")
    if not gate.has_passed(get_server_args()):
        fatal(gate.UNCHECKED)
    model = releases.model_config(get_server_args())
    told: tuple[str, Any] = DTYPE, torch.uint8
    for feature in features():
        feature.prepare_worker(model)
        told = feature.cache_dtype(model, kwargs["model_dtype"]) or told
    return told


class PlanConfigurator(MemoryPoolConfigurator):
    """Pool sizes of a model by its memory plan, which is made from the budget that SGLang has measured.

    Args:
        configurator: SGLang's KVCacheConfigurator.
    """

    def __init__(self, configurator: Any) -> None:
        self.configurator = configurator

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Sizes from a budget in bytes."""
        try:
            plan = plan_for(self.configurator, available_bytes)
        except Int2Error as error:
            fatal(error)
        keep_plan(self.configurator, plan)
        tokens = int((available_bytes - plan.fixed_bytes) // plan.token_bytes)
        if has_cut_layers(self.configurator):
            tokens = smallest(tokens)
        return self.calculate_pool_sizes_from_max_tokens(tokens, page_size)

    def calculate_pool_sizes_from_max_tokens(self, max_total_num_tokens: int, page_size: int) -> MemoryPoolConfig:
        """Sizes from the tokens of the history pool.

        Raises:
            ValueError: a pool would hold no request; as SGLang says it.
        """
        tokens, plan = max_total_num_tokens // page_size * page_size, plan_of(self.configurator)
        beside = [feature.pool_sizes(plan, tokens, page_size) for feature in features()]
        return MemoryPoolConfig(
            max_total_num_tokens=tokens, **{name: size for sizes in beside for name, size in sizes.items()}
        )

    def finalize_with_max_running_requests(self, config: MemoryPoolConfig) -> MemoryPoolConfig:
        """Admit no more requests than there are windows for."""
        assert config.max_running_requests is not None
        config.max_running_requests = min(config.max_running_requests, plan_of(self.configurator).max_running)
        return config


def plan_for(configurator: Any, budget_bytes: int) -> MemoryPlan:
    """The memory plan of a model.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        budget_bytes: for cache, window buffers and workspaces.

    Raises:
        Int2Error: the budget is too small, or the rotations cannot be loaded.
    """
    from sglang.srt.runtime_context import get_schedule

    geometry = geometry_of(configurator)
    sizing = Sizing(configurator, geometry, budget_bytes)
    parts = [part for feature in features() for part in feature.parts(sizing)]
    # SGLang runs one request where it is told to run none.
    asked = get_schedule().max_running_requests
    running = asked if asked is None else max(1, asked // replicas(releases.resolved(configurator.server_args)))
    plan = make_plan(geometry, budget_bytes, running, configurator.page_size, parts)
    # Stages have other layers, and ranks other parts of them: all take the smallest limit, or they would evict apart.
    if releases.resolved(configurator.server_args).pp_size > 1 or has_cut_layers(configurator):
        plan = make_plan(geometry, budget_bytes, smallest(plan.max_running), configurator.page_size, parts)
    return plan


def smallest(number: int) -> int:
    """The smallest of the numbers of all ranks."""
    from sglang.srt.distributed.parallel_state import get_world_group

    found = torch.tensor(number)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return int(found)


def around_create_configurator(original: Callable[[Any], Any], kvc: Any) -> Any:
    """Size pools by the memory plan; those of a draft model follow the model's."""
    return PlanConfigurator(kvc) if is_int2(kvc.server_args) and not kvc.is_draft_worker else original(kvc)


def around_build_token_to_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Build the INT2 pool with its window buffers, and its cache object; of a draft model, SGLang's own pool."""
    if not is_int2(self.server_args):
        return original(self, **kwargs)
    try:
        if self.is_draft_worker:
            pool = original(self, **kwargs)
            check_draft_pool(pool, kwargs["req_to_token_pool"])
            return pool
        return build_pool(self, plan_of(self), kwargs["sizes"], kwargs["req_to_token_pool"])
    except Int2Error as error:
        fatal(error)
