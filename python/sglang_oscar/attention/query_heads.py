"""Query heads of the layers that attend to the INT2 cache: kernels are compiled for their number."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sglang_oscar.errors import Int2Error


def query_heads(model: Any, cached: Collection[int]) -> int:
    """How many each of these layers has on this rank. The configuration may say the number of others.

    Args:
        model: the loaded model.
        cached: ids of the layers with an INT2 cache.

    Raises:
        Int2Error: they differ.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {
        module.tp_q_head_num: module.layer_id
        for module in model.modules()
        if isinstance(module, RadixAttention) and module.layer_id in cached
    }
    if len(found) != 1:
        each = ", ".join(f"{heads} in layer {layer}" for heads, layer in sorted(found.items())) or "none"
        raise Int2Error(
            f"--kv-cache-dtype int2 needs the same query heads in all layers that attend to all tokens; the model has "
            f"{each}; use --kv-cache-dtype auto"
        )
    return next(iter(found))
