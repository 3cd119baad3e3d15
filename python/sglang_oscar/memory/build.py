"""Allocating an INT2 pool, its side buffers and its cache object."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_oscar.attach import refusals
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.layer_params import LayerParams
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.side_buffers import SideBuffers
from sglang_oscar.requests.metrics import refill_counter
from sglang_oscar.requests.row_tables import RowTables
from sglang_oscar.requests.sink_refill import SinkRefills
from sglang_oscar.requests.sink_store import SinkStore
from sglang_oscar.settings import of_this_process
from sglang_oscar.weights import absorption
from sglang_oscar.weights.rotations import Rotations, load_rotations

logger = logging.getLogger(__name__)


def build_pool(configurator: Any, plan: MemoryPlan, sizes: Any, req_to_token_pool: Any) -> Int2TokenToKVPool:
    """Allocate everything an INT2 pool needs; its cache is found through it and through the request pool.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        plan: of its memory.
        sizes: its resolved pool sizes.
        req_to_token_pool: SGLang's request pool; its rows are the rows of the rings.

    Raises:
        Int2Error: the model or the rotations do not fit int2 mode.
    """
    settings, device = of_this_process(), configurator.device
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
    layers = layer_params(rotations, buffers.layer_caches(pool), device, absorbed, own_heads(plan))
    cache = Int2Cache(
        settings=settings,
        plan=plan,
        page_size=configurator.pool_page_size,
        req_to_token_pool=req_to_token_pool,
        rows=RowTables(rows, device),
        sinks=SinkStore(plan.sink_blocks),
        layers=dict(enumerate(layers, start=pool.start_layer)),
        refills=SinkRefills(refill_counter(configurator.server_args)),
    )
    cache.attach(pool)
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


def layer_params(
    rotations: Rotations, caches: list[Any], device: str, absorbed: bool, heads: slice
) -> list[LayerParams]:
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
        LayerParams(
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
