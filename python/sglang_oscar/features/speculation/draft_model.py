"""The model that drafts: what its cache costs beside the INT2 one, and which draft models are refused.

Its cache is SGLang's own, in the draft model's dtype or in FP8, and has the slots of the INT2 cache: a token's slot is
its place in both. So the two share the requests' tables, the prefix cache and one memory budget.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import drafts_with_model
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.drafts import cache_dtype, config_of
from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.owned import by_slot
from sglang_oscar.memory.part import Part, Sizing
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.settings import Settings

logger = logging.getLogger(__name__)


def check_server(args: Any, settings: Settings, model: Any) -> None:
    """:func:`check` of a server's draft model, where it has one.

    Args:
        args: server arguments as SGLang resolved them.
        settings: of int2 mode.
        model: SGLang's ModelConfig of the model.
    """
    if drafts_with_model(args):
        check(config_of(args), model)


def check(draft: Any, model: Any) -> None:
    """Refuse draft models whose cache is not what is planned for.

    Args:
        draft: SGLang's ModelConfig of the draft model.
        model: of the model that is served.

    Raises:
        Int2Error: naming the draft model and what is wrong with it.
    """
    refused = [
        (draft.attention_arch.name != "MHA", "multi-head latent attention (MLA)"),
        (draft.is_hybrid_swa, "sliding-window attention layers"),
        (
            draft.hf_config.architectures[0] == model.hf_config.architectures[0],
            "the architecture of a whole model, which does not draft",
        ),
    ]
    for wrong, what in refused:
        if wrong:
            raise Int2Error(
                f"--kv-cache-dtype int2 does not support a draft model with {what}: {draft.model_path}; set "
                "--speculative-draft-model-path to another, or drop --speculative-algorithm"
            )


def layers(draft: Any) -> int:
    """Attention layers of a draft model with a cache.

    Args:
        draft: SGLang's ModelConfig of it.
    """
    # An older release says it of a multimodal model, and not of the text part that it looks at itself.
    own = draft.num_nextn_predict_layers or getattr(draft.hf_config, "num_nextn_predict_layers", None)
    return int(own) if own else max(draft.num_hidden_layers, draft.num_attention_layers)


def cell_bytes(draft: Any, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of a token in the cache of a draft model, K and V of all its layers, on one rank.

    Args:
        draft: SGLang's ModelConfig of it.
        ranks: that share the heads.
        dtype: of the numbers in the cache.
    """
    elements = draft.get_num_kv_heads(ranks) * (draft.head_dim + draft.v_head_dim)
    return int(layers(draft) * elements * dtype.itemsize)


@dataclass(frozen=True)
class DraftCache(Part):
    """The draft model's cache: ``cell_bytes`` for every token of the history pool."""

    cell_bytes: int

    name = "the draft model's cache"

    @property
    def bytes_per_token(self) -> int:
        """Bytes for every token of the history pool."""
        return self.cell_bytes

    def lines(self, plan: MemoryPlan, tokens: int) -> list[str]:
        """For the start-up account, with what the same memory would hold without drafts."""
        share = self.cell_bytes / plan.token_bytes
        return [
            f"draft model's cache: {tokens} tokens x {self.cell_bytes} bytes = {tokens * self.cell_bytes / GIB:.3f} "
            f"GiB, not quantized; without it the same memory would hold {share / (1 - share):.0%} more tokens"
        ]


def parts(sizing: Sizing) -> list[DraftCache]:
    """What the draft model of a worker's server needs; nothing where there is none."""
    size = cell_bytes_of(sizing.configurator.server_args)
    return [DraftCache(size)] if size else []


def check_pool(pool: Any, cache: Int2Cache) -> None:
    """Compare a draft model's pool with what was planned for it; requests own rows of it from now on.

    Args:
        pool: SGLang's KV pool of the draft model.
        cache: of the model.

    Raises:
        Int2Error: it takes more.
    """
    pool = getattr(pool, "full_kv_pool", pool)  # of a hybrid model's own draft layer
    slots = pool.k_buffer[0].shape[0]
    cell_bytes = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer)) // slots
    logger.info(
        "int2 draft model: %s, %d tokens x %d bytes, %d layers in %s",
        type(pool).__name__, slots, cell_bytes, len(pool.k_buffer), pool.k_buffer[0].dtype,
    )  # fmt: skip
    planned = cache.plan.part(DraftCache)
    if planned is None or cell_bytes > planned.cell_bytes:
        raise Int2Error(
            f"the draft model's cache takes {cell_bytes} bytes a token, {planned.cell_bytes if planned else 0} were "
            "planned; drop --speculative-algorithm"
        )
    # SGLang's copies of what retracted requests have are of the model's own pool.
    cache.holdings["row of drafts"] = by_slot(
        [*pool.k_buffer, *pool.v_buffer], cache.req_to_token_pool.req_to_token, carried=True
    )


def cell_bytes_of(server_args: Any) -> int:
    """:func:`cell_bytes` of a worker's draft model; 0 where it has none.

    Args:
        server_args: SGLang's ServerArgs, resolved.
    """
    args = releases.resolved(server_args)
    if not drafts_with_model(args):
        return 0
    from sglang.srt.runtime_context import get_parallel

    draft = config_of(server_args)
    return cell_bytes(draft, get_parallel().attn_tp_size, cache_dtype(args, draft))
