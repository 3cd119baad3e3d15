"""Attention of a draft model on a machine without a GPU: SGLang's in torch, which lacks drafting in steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class StepBackend(TorchNativeAttnBackend):
    """Decodes draft number ``step`` of every request, counted from 0: that many drafts and one lie before it.

    SGLang's batch keeps the lengths of the first step through all of them.
    """

    def __init__(self, model_runner: Any, step: int) -> None:
        super().__init__(model_runner)
        self.step = step

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """SGLang's, over the drafts so far."""
        batch = copy.copy(forward_batch)
        batch.seq_lens = forward_batch.seq_lens + self.step + 1
        return super().forward_decode(q, k, v, layer, batch, save_kv_cache, **kwargs)  # type: ignore[no-any-return]


class DraftSteps:
    """Attention of the steps of a chain of drafts, as SGLang's draft worker wants it.

    Args:
        model_runner: SGLang's model runner of the draft model.
        steps: drafts of a chain; the last one is not attended to.
    """

    def __init__(self, model_runner: Any, steps: int) -> None:
        self.attn_backends = [StepBackend(model_runner, step) for step in range(steps - 1)]
        self.needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare every step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
