"""What one layer attends with: handed on from SGLang's call through the backend to the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """One layer's call of attention, checked.

    Args:
        q: [tokens, q_heads, head_dim].
        k, v: [tokens, kv_heads, head_dim] in the dtype of ``q``; ``v`` in the basis of the cached values if the weights
            have been multiplied for that.
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
