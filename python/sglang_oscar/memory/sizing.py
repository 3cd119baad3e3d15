"""Hooks into SGLang's memory sizing: dtype, bytes per token, budget, number of requests, and the pool itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.attach import flags, gate, refusals
from sglang_oscar.attention import extend_choice
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.memory import runtime
from sglang_oscar.memory.plan import Geometry, MemoryPlan, make_plan
from sglang_oscar.settings import of_this_process
from sglang_oscar.weights import absorption
from sglang_oscar.weights.rotations import Rotations, load_rotations

logger = logging.getLogger(__name__)
_plan: MemoryPlan | None = None


def is_int2(server_args: Any) -> bool:
    """Whether these server arguments ask for int2 mode."""
    return server_args.kv_cache_dtype == flags.DTYPE


def geometry_of(configurator: Any) -> Geometry:
    """Sizes of this rank from SGLang's KVCacheConfigurator."""
    from sglang.srt.runtime_context import get_parallel

    settings = of_this_process()
    model, args = configurator.model_config, configurator.server_args
    layout = gate.row_layout(args, settings, model, model.get_num_kv_heads(get_parallel().attn_tp_size))
    layers = configurator.layer_info.num_effective_layers
    return Geometry(layout, settings.windows, settings.window_torch_dtype, layers)


def extend_workspace(configurator: Any, geometry: Geometry, budget_bytes: int) -> extend_choice.Workspace | None:
    """What extend takes of the budget; None where it needs nothing.

    Raises:
        Int2Error: the backend that is asked for cannot be had.
    """
    from sglang.srt.runtime_context import get_parallel

    backend = extend_choice.choose(of_this_process().extend_backend, configurator.server_args.device)
    if backend != "flashinfer":
        return None
    model = configurator.model_config
    q_heads = model.num_attention_heads // get_parallel().attn_tp_size
    return extend_choice.workspace(geometry.layout, q_heads, model.dtype, budget_bytes)


def around_configure_kv_cache_dtype(original: Callable[..., Any], **kwargs: Any) -> Any:
    """Resolve ``int2`` to byte rows; first int2 step in a worker, so it also checks that all hooks are attached."""
    if kwargs["server_args_kv_cache_dtype"] != flags.DTYPE:
        return original(**kwargs)
    from sglang_oscar import plugin
    from sglang_oscar.attention import backend

    if (reason := plugin.failure()) is not None:
        fatal(f"int2 mode cannot attach to SGLang: {reason}")
    backend.register()
    return flags.DTYPE, torch.uint8


def around_compute_cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of one token in the history pool."""
    return geometry_of(kvc).cell_bytes if is_int2(kvc.server_args) else original(self, kvc, num_layers)


def after_profile_available_bytes(available: int, self: Any, pre_model_load_memory: int) -> int | None:
    """Take the side buffers off the budget before the history pool is sized from it."""
    if not is_int2(self.server_args):
        return None
    from sglang.srt.runtime_context import get_schedule

    global _plan
    schedule = get_schedule()
    try:
        geometry = geometry_of(self)
        extend = extend_workspace(self, geometry, available)
        _plan = make_plan(geometry, available, schedule.max_running_requests, self.page_size, extend)
    except Int2Error as error:
        fatal(error)
    return available - _plan.fixed_bytes


def around_resolve_max_num_reqs(original: Callable[..., int], self: Any, token_capacity: int) -> int:
    """Admit no more requests than there are windows for."""
    limit = original(self, token_capacity)
    return min(limit, _plan.max_running) if is_int2(self.server_args) and _plan else limit


def after_post_capture_kv_sizing_planned(planned: bool, self: Any) -> bool | None:
    """Size the pool before graph capture: the alternative reserves address space that byte rows cannot use."""
    return False if is_int2(self) else None


def around_build_token_to_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Build the INT2 pool, its side buffers and the runtime of this process."""
    if not is_int2(self.server_args):
        return original(self, **kwargs)
    try:
        return build_pool(self, kwargs["sizes"], kwargs["req_to_token_pool"])
    except Int2Error as error:
        fatal(error)


def build_pool(configurator: Any, sizes: Any, req_to_token_pool: Any) -> Any:
    """Allocate everything int2 mode needs and install the runtime.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        sizes: its resolved pool sizes.
        req_to_token_pool: SGLang's request pool; its rows are the rows of the rings.

    Raises:
        Int2Error: the model or the rotations do not fit int2 mode.
    """
    from sglang_oscar.memory.pool import Int2TokenToKVPool
    from sglang_oscar.memory.side_buffers import SideBuffers
    from sglang_oscar.requests.row_tables import RowTables
    from sglang_oscar.requests.sink_store import SinkStore

    assert _plan is not None
    settings, device, plan = of_this_process(), configurator.device, _plan
    check_layers(configurator.model, plan.geometry.layers)
    rotations = load_rotations(settings, plan.geometry.layers, plan.geometry.layout.head_dim)
    pool = Int2TokenToKVPool(
        sizes.max_total_num_tokens,
        layout=plan.geometry.layout,
        page_size=configurator.pool_page_size,
        layer_num=plan.geometry.layers,
        device=device,
        enable_memory_saver=False,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
    )
    absorbed = absorption.is_absorbed(configurator.model, configurator.server_args, settings)
    rows = req_to_token_pool.req_to_token.shape[0]
    buffers = SideBuffers(plan.geometry, rows, plan.sink_blocks, device)
    runtime.install(
        runtime.Runtime(
            settings=settings,
            plan=plan,
            page_size=configurator.pool_page_size,
            req_to_token_pool=req_to_token_pool,
            rows=RowTables(rows, device),
            sinks=SinkStore(plan.sink_blocks),
            layers=layer_params(rotations, buffers.layer_caches(pool), device, absorbed, own_heads(plan)),
        )
    )
    for line in plan.lines(sizes.max_total_num_tokens):
        logger.info("int2 memory: %s", line)
    return pool


def check_layers(model: Any, layers: int) -> None:
    """Refuse models whose attention layers do not map one to one to cache layers.

    Raises:
        Int2Error: an unsupported attention feature, or layers that share their cache.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    for layer in found:
        refusals.check_attention_layer(layer)
    if sorted(layer.layer_id for layer in found) != list(range(layers)):
        raise Int2Error(
            f"--kv-cache-dtype int2 needs one attention layer per cache layer; the model has {len(found)} for "
            f"{layers}; use --kv-cache-dtype auto"
        )


def own_heads(plan: MemoryPlan) -> slice:
    """The kv heads of the model that this tensor-parallel rank keeps."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    parallel, kept = get_parallel(), plan.geometry.layout.kv_heads
    total = get_server_args().get_model_config().get_total_num_kv_heads()
    # Fewer kv heads than ranks: neighbouring ranks keep the same one.
    first = parallel.attn_tp_rank * total // parallel.attn_tp_size
    return slice(first, first + kept)


def layer_params(rotations: Rotations, caches: list[Any], device: str, absorbed: bool, heads: slice) -> list[Any]:
    """Constants of every layer, on the device; ``absorbed`` values come rotated out of their projection.

    ``heads`` are the model's kv heads that the caches hold.
    """

    def placed(tensor: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [None] * len(caches) if tensor is None else list(tensor.to(device))

    key, value = rotations.key, rotations.value
    if value.rotation is not None:
        logger.info("int2 rotation of values: %s", "absorbed into the weights" if absorbed else "online, at every step")
    online = not absorbed
    centers = None if key.centers is None else key.centers[:, heads].contiguous()
    return [
        runtime.LayerParams(
            cache=cache,
            k_rotation=k_rotation,
            v_rotation=v_rotation,
            k_clip=k_clip,
            v_clip=v_clip,
            q_rotation=q_rotation,
            v_back=v_back,
            k_center=center,
            k_gain=k_gain,
            v_gain=v_gain,
        )
        for cache, k_rotation, v_rotation, k_clip, v_clip, q_rotation, v_back, center, k_gain, v_gain in zip(
            caches,
            placed(key.rotation),
            placed(value.rotation if online else None),
            key.clip_ratios,
            value.clip_ratios,
            placed(key.dual),
            placed(value.dual if online else None),
            placed(centers),
            key.gains,
            value.gains,
            strict=True,
        )
    ]
