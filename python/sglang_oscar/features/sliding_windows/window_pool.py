"""What layers with a sliding window take of the KV budget.

SGLang sizes their pool by the tokens of the other one (``--swa-full-tokens-ratio``), so that windows in 16 bits would
take most of what the INT2 rows save. Here it is sized by what runs, unless that flag is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.part import Part
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.settings import Settings

STOCK_RATIO = 0.8
"""SGLang's default of --swa-full-tokens-ratio."""


def aligned(tokens: int, page_size: int) -> int:
    """Tokens rounded up to whole pages."""
    return -(-tokens // page_size) * page_size


@dataclass(frozen=True)
class WindowPool(Part):
    """The pool of layers with a sliding window, of one rank.

    Args:
        row_bytes: of a token by layer, of keys and of values.
        dtype: of keys and values.
        window: tokens before its own that a token sees.
        recent: tokens at the end of a prompt that a prefix hit leaves to compute.
        page_size: tokens of a page.
        interval: tokens that SGLang lets leave the window before it frees them.
        in_flight: tokens of prompts that are computed at once.
        drafts: tokens for which SGLang takes slots ahead of a request that drafts.
        ratio: tokens per token of the INT2 pool, where the operator decides that; None to size it by what runs.
    """

    row_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    window: int
    recent: int
    page_size: int
    interval: int
    in_flight: int
    drafts: int = 0
    ratio: float | None = None

    name = "the cache of layers with a sliding window"
    flag = "--chunked-prefill-size"

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.row_bytes[0])

    @property
    def token_bytes(self) -> int:
        """Of a token, keys and values of all layers."""
        return sum(map(sum, self.row_bytes))

    @property
    def kept(self) -> int:
        """Tokens at the end of a request that keep their keys and values: those that the next turn's hit needs.

        A hit ends up to ``recent`` tokens before the end, and needs a window in front of where it ends.
        """
        return aligned(self.window, self.page_size) + aligned(self.recent, self.page_size) + self.page_size

    @property
    def request_tokens(self) -> int:
        """Tokens for a running request: the window of its prompt, its own end, and that of an idle conversation."""
        running = aligned(self.window, self.page_size) + self.kept + self.interval + self.drafts + 2 * self.page_size
        return aligned(running, self.page_size) + self.kept

    def tokens(self, requests: int, full_tokens: int) -> int:
        """Size of the pool.

        Args:
            requests: that have windows, running or waiting.
            full_tokens: of the INT2 pool; this one is never larger.
        """
        if self.ratio is not None:
            return int(full_tokens * self.ratio) // self.page_size * self.page_size
        wanted = aligned(requests * self.request_tokens + self.in_flight, self.page_size)
        return min(wanted, full_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of this pool for every token of the INT2 pool; 0 where its size does not depend on that."""
        return math.ceil((self.ratio or 0.0) * self.token_bytes)

    def fixed_bytes(self, requests: int) -> int:
        """Bytes that do not depend on the INT2 pool."""
        if self.ratio is not None:
            return 0
        return aligned(requests * self.request_tokens + self.in_flight, self.page_size) * self.token_bytes

    def lines(self, plan: MemoryPlan, tokens: int) -> list[str]:
        """For the start-up account, with what the same memory would hold in 16 bits."""
        full_tokens, full_bytes, full_16bit_bytes = tokens, plan.geometry.cell_bytes, plan.geometry.full_token_bytes
        tokens = self.tokens(plan.requests, full_tokens)
        if self.ratio is None:
            why = f"{plan.owners} x {self.request_tokens} and {self.in_flight} of prompts"
        else:
            why = f"--swa-full-tokens-ratio {self.ratio:g}"
        dtype = str(self.dtype).removeprefix("torch.")
        spent = full_tokens * full_bytes + tokens * self.token_bytes
        stock = int(spent / (full_16bit_bytes + STOCK_RATIO * self.token_bytes))
        return [
            f"window layers: {self.layers} in {dtype}, {self.token_bytes} bytes a token x {tokens} tokens = "
            f"{tokens * self.token_bytes / GIB:.3f} GiB ({why})",
            f"bytes per token: {full_bytes} of full layers, {full_16bit_bytes / full_bytes:.1f} times less than in 16 "
            f"bits; both pools in 16 bits at SGLang's ratio of {STOCK_RATIO:g} would hold {stock} tokens, "
            f"{full_tokens / max(stock, 1):.1f} times fewer",
        ]


def window_pool(
    model: Any,
    settings: Settings,
    window: int,
    ranks: int,
    page_size: int,
    in_flight: int,
    drafts: int,
    ratio: float | None,
) -> WindowPool | None:
    """What the layers with a window of a model need; None where there are none.

    Args:
        model: SGLang's ModelConfig.
        settings: of int2 mode.
        window: tokens before its own that a token sees.
        ranks: that share the heads.
        page_size: tokens of a page.
        in_flight: tokens of prompts that are computed at once.
        drafts: tokens for which SGLang takes slots ahead of a request that drafts.
        ratio: tokens per token of the INT2 pool, where the operator decides that.
    """
    from sglang.srt.environ import envs

    if not model.is_hybrid_swa:
        return None
    layers = len(model.swa_attention_layer_ids)
    keys, values = (
        model.get_swa_num_kv_heads(ranks) * head_dim * model.dtype.itemsize
        for head_dim in (model.swa_head_dim, model.swa_v_head_dim)
    )
    return WindowPool(
        row_bytes=((keys,) * layers, (values,) * layers),
        dtype=model.dtype,
        window=window,
        recent=settings.windows.recent if settings.recompute_recent else 0,
        page_size=page_size,
        interval=max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get()),
        in_flight=in_flight,
        drafts=drafts,
        ratio=ratio,
    )
