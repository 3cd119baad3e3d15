"""Allocating an INT2 pool, its window buffers and its cache object."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import AnyFormat, LayerFormat, code_widths, fingerprint, mean_bits
from sglang_oscar import metrics
from sglang_oscar.attach import refusals, releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.attach.feature import features
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.rotations import model_rotations
from sglang_oscar.formats.warnings import rotation_warnings, served_identity
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.facts import facts
from sglang_oscar.memory.layer import AnyLayer, CachedLayer, CutLayer
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.memory.pool import Int2TokenToKVPool
from sglang_oscar.memory.saver import kv_region
from sglang_oscar.memory.seat_tables import SeatTables
from sglang_oscar.memory.sink_store import SinkStore
from sglang_oscar.memory.window_buffers import WindowBuffers
from sglang_oscar.worker import of_this_process

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """What rooms find when a pool has been built.

    ``configurator`` is SGLang's KVCacheConfigurator, ``sizes`` its resolved pool sizes; ``pool`` is the INT2 pool and
    ``cache`` all that belongs to it.
    """

    configurator: Any
    sizes: Any
    pool: Int2TokenToKVPool
    cache: Int2Cache


def build_pool(configurator: Any, plan: MemoryPlan, sizes: Any, req_to_token_pool: Any) -> Any:
    """Allocate everything an INT2 pool needs; its cache is found through it and through the request pool.

    Returns:
        the pool that SGLang gets: the INT2 pool, or one that holds it.

    Args:
        configurator: SGLang's KVCacheConfigurator.
        plan: of its memory.
        sizes: its resolved pool sizes.
        req_to_token_pool: SGLang's request pool; each of its seats has a ring.

    Raises:
        Int2Error: the model or the rotations do not fit int2 mode.
    """
    from sglang.srt.runtime_context import get_parallel

    settings, device, geometry = of_this_process(), configurator.device, plan.geometry
    model_config, args = configurator.model_config, releases.resolved(configurator.server_args)
    windows = set(model_config.swa_attention_layer_ids) if model_config.is_hybrid_swa else set()
    check_layers(configurator.model, geometry.formats, windows)
    whole, recipe, key_errors = model_rotations(configurator.server_args, settings, model_config)
    pool = Int2TokenToKVPool(
        sizes.max_total_num_tokens,
        formats=geometry.formats,
        page_size=configurator.pool_page_size,
        device=device,
        enable_memory_saver=args.enable_memory_saver,
        start_layer=configurator.layer_info.start_layer,
        end_layer=configurator.layer_info.end_layer,
        enable_kv_cache_copy=new_tokens(args) > 0,
    )
    seats = req_to_token_pool.req_to_token.shape[0]
    with kv_region(pool):
        buffers = WindowBuffers(geometry, seats + plan.copies, plan.sink_blocks + plan.copies, device)
    cache = Int2Cache(
        settings=settings,
        plan=plan,
        page_size=configurator.pool_page_size,
        req_to_token_pool=req_to_token_pool,
        seats=SeatTables(seats, device),
        sinks=SinkStore(plan.sink_blocks),
        layers=cached_layers(geometry.formats, buffers.layer_caches(pool), device),
        fingerprint=fingerprint(whole),
        window_buffers=buffers,
        recipe=recipe,
        key_errors=key_errors,
    )
    cache.attach(pool)
    if get_parallel().attn_tp_rank == 0:
        identity = served_identity(args, model_config)
        for warning in rotation_warnings(settings, model_config, identity, whole):
            logger.warning("int2 rotations: %s", warning)
    logger.info(
        "int2 format: %s, %.2f bits per element; bits by layer: %s",
        cache.fingerprint[:12], mean_bits(whole.values()), code_widths(whole.values()),
    )  # fmt: skip
    for line in plan.lines(sizes.max_total_num_tokens):
        logger.info("int2 memory: %s", line)
    built = Built(configurator, sizes, pool, cache)
    given: Any = pool
    for feature in features():
        cache.holdings |= feature.owns(built)
        given = feature.built(built) or given
    metrics.publish(facts(cache))
    return given


def check_draft_pool(pool: Any, req_to_token_pool: Any) -> None:
    """Let rooms compare a draft model's pool with what they planned for it.

    Args:
        pool: SGLang's KV pool of the draft model.
        req_to_token_pool: SGLang's request pool, which draft model and model share.

    Raises:
        Int2Error: it takes more.
    """
    cache = cache_of(req_to_token_pool)
    assert cache is not None, "the model's pool is built before its draft model's"
    for feature in features():
        feature.draft_pool_built(pool, cache)


def cached_layers(
    formats: Mapping[int, AnyFormat], caches: Mapping[int, Sequence[LayerCache]], device: str
) -> dict[int, AnyLayer]:
    """Tensors and formats of every layer by its id, on the device.

    Args:
        formats: of this rank's heads.
        caches: the tensors, of the parts of the same layers.
        device: of the tensors.
    """

    def made(part: LayerFormat, cache: LayerCache) -> CachedLayer:
        moved = part.to(device)
        if moved.key.codebook is not None:
            cache = replace(cache, k_codebook=moved.key.codebook)
        return CachedLayer(cache, moved)

    layers: dict[int, AnyLayer] = {}
    for layer_id, layer in formats.items():
        parts = tuple(made(*of) for of in zip(layer.parts, caches[layer_id], strict=True))
        layers[layer_id] = parts[0] if len(parts) == 1 else CutLayer(parts)
    return layers


def check_layers(model: Any, formats: Mapping[int, AnyFormat], windows: Collection[int] = ()) -> None:
    """Refuse models whose attention layers do not map one to one to cache layers, or have other heads than these.

    Args:
        model: the loaded model.
        formats: of this rank's cache layers, by layer id.
        windows: of layers with a sliding window, whose cache is SGLang's.

    Raises:
        Int2Error: an unsupported attention feature, layers that share their cache, or heads that differ by layer.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    every = [module for module in model.modules() if isinstance(module, RadixAttention)]
    found = [layer for layer in every if layer.layer_id not in windows]
    for layer in found:
        refusals.check_attention_layer(layer)
    if sorted(layer.layer_id for layer in found) != sorted(formats):
        raise Int2Error(
            f"--kv-cache-dtype int2 needs one attention layer per cache layer; the model has {len(found)} for "
            f"{len(formats)}; use --kv-cache-dtype auto"
        )
    for layer in found:
        kept = formats[layer.layer_id]
        keys, values = (kept.kv_heads, kept.head_dim), (kept.kv_heads, kept.value_head_dim)
        own = (layer.tp_k_head_num, layer.head_dim), (layer.tp_v_head_num, layer.v_head_dim)
        if own != (keys, values):
            said = [f"{heads} of {channels} channels" for heads, channels in dict.fromkeys(own)]
            wanted = [f"{heads} of {channels}" for heads, channels in dict.fromkeys((keys, values))]
            raise Int2Error(
                f"--kv-cache-dtype int2 needs the same kv heads in all layers; layer {layer.layer_id} has "
                f"{' and '.join(said)}, the configuration says {' and '.join(wanted)}; use --kv-cache-dtype auto"
            )
