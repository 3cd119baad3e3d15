"""What one layer attends with: handed on from SGLang's call through the backend to the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from oscar_kernels.parts import split_heads
from sglang_oscar.memory.layer import AnyLayer, CachedLayer

Scale = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor]
"""See :func:`oscar_kernels.sink_logits.scale_by_sinks`; whether ``out`` is overwritten does not matter here."""


class Call(NamedTuple):
    """One layer's call of attention, checked.

    Args:
        q: [tokens, q_heads, head_dim].
        k, v: [tokens, kv_heads, head_dim] in the dtype of ``q``; heads of ``v`` may have another size.
        out_cache_loc: int64 [tokens], history slots of the tokens.
        layer_id: of the attention layer.
        sm_scale: factor on the logits.
        sinks: [q_heads], sink logits of the layer's heads (:mod:`oscar_kernels.sink_logits`); None for a model without.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out_cache_loc: torch.Tensor
    layer_id: int
    sm_scale: float
    sinks: torch.Tensor | None = None

    def first(self, tokens: int) -> Call:
        """The call without what lies behind ``tokens``."""
        return self._replace(
            q=self.q[:tokens], k=self.k[:tokens], v=self.v[:tokens], out_cache_loc=self.out_cache_loc[:tokens]
        )

    def apart(self, layer: AnyLayer) -> Iterator[tuple[CachedLayer, Call]]:
        """Parts of the layer, each with a call for its own heads."""
        caches = [part.cache for part in layer.parts]
        sinks = [None] * len(caches) if self.sinks is None else split_heads(self.sinks, caches, 0)
        own = zip(*(split_heads(x, caches) for x in (self.q, self.k, self.v)), sinks, strict=True)
        for part, (q, k, v, some) in zip(layer.parts, own, strict=True):
            yield part, self._replace(q=q, k=k, v=v, sinks=some)

    def sums(self) -> torch.Tensor | None:
        """Room for the log-sum-exp of every query, float32 [tokens, q_heads]; None where no sink logits need them."""
        if self.sinks is None:
            return None
        return torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)

    def with_sinks(
        self, out: torch.Tensor, lse: torch.Tensor | None, plain_center: torch.Tensor | None, scale: Scale
    ) -> torch.Tensor:
        """Attention with the layer's sink logits, where it has some.

        Args:
            out: attention without them, [tokens, q_heads, head_dim].
            lse: from :meth:`sums`, filled.
            plain_center: of the keys that were attended to; None where they are not centered.
            scale: what works it out on this device.
        """
        if self.sinks is None or lse is None:
            return out
        return scale(out, lse, self.sinks, self.q, plain_center, self.sm_scale)
