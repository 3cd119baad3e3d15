"""Perplexity at the end of long contexts, and how far the next-token distribution moves."""

from __future__ import annotations

import math
from typing import Any

import torch

from accuracy.attention import prefill_then_decode
from accuracy.measures.intervals import Estimate, bootstrap
from accuracy.methods.base import Method
from accuracy.session import Session


class Language:
    """Teacher-forced decoding of the last ``tail`` tokens of every context.

    Args:
        model: the model.
        ids: int64 [contexts, n].
        tail: decoded tokens; the rest is the prompt, computed in one chunk.
    """

    def __init__(self, model: Any, ids: torch.Tensor, tail: int) -> None:
        self.session = Session(model, ids, prefill_then_decode(ids.shape[1], ids.shape[1] - tail))
        self.targets = self.session.ids[:, -tail + 1 :]
        from accuracy.methods.bf16 import Bf16

        exact = self.session.run(Bf16().view(self.session.schedule), hidden=True)
        self.exact = exact.logits.log_softmax(-1)
        self.hidden = exact.hidden

    def measure(self, method: Method) -> dict[str, Any]:
        """``nll`` and ``excess`` (over BF16) in nats per token, ``perplexity``, ``kl`` (BF16 || method), each by
        context with an interval, and ``hidden``: relative squared error of the hidden state behind every layer."""
        found = self.session.run(method.view(self.session.schedule), hidden=True)
        logs = found.logits.log_softmax(-1)
        nll, base = (-x[:, :-1].gather(-1, self.targets[..., None])[..., 0].mean(1) for x in (logs, self.exact))
        kl = (self.exact.exp() * (self.exact - logs)).sum(-1).mean(1)
        errors = [
            float((a - b).square().sum() / b.square().sum()) for a, b in zip(found.hidden, self.hidden, strict=True)
        ]
        estimates = {"nll": nll, "excess": nll - base, "kl": kl}
        out: dict[str, Any] = {name: vars(bootstrap(x.cpu().numpy())) for name, x in estimates.items()}
        e = out["nll"]
        out["perplexity"] = vars(Estimate(*(math.exp(e[name]) for name in ("mean", "low", "high"))))
        return out | {"hidden": errors[1:]}
