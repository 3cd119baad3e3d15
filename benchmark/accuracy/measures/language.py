"""Perplexity at the end of long contexts, and how far the next-token distribution moves."""

from __future__ import annotations

import math
from typing import Any

import torch

from accuracy.attention import prefill_then_decode
from accuracy.methods.base import Method
from accuracy.session import Session
from oscar_tools.evaluation.intervals import Estimate, bootstrap


class Language:
    """Teacher-forced decoding of the last ``tail`` tokens of every context.

    Args:
        model: the model.
        ids: int64 [contexts, n].
        tail: decoded tokens; the rest is the prompt, computed in one chunk.
        batch: contexts at a time; 0 for all.
        hidden: whether errors of hidden states are measured, too.
    """

    def __init__(self, model: Any, ids: torch.Tensor, tail: int, batch: int = 0, hidden: bool = True) -> None:
        schedule = prefill_then_decode(ids.shape[1], ids.shape[1] - tail)
        self.tail, self.with_hidden = tail, hidden
        self.sessions = [Session(model, part, schedule) for part in ids.split(batch or len(ids))]
        from accuracy.methods.bf16 import Bf16

        self.exact, self.hidden = [], []
        for session in self.sessions:
            exact = session.run(Bf16().view(session.schedule), hidden=hidden)
            self.exact.append(exact.logits.log_softmax(-1))
            self.hidden.append(exact.hidden)

    def measure(self, method: Method) -> dict[str, Any]:
        """``nll`` and ``excess`` (over BF16) in nats per token, ``perplexity``, ``kl`` (BF16 || method), each by
        context with an interval, and ``hidden``: relative squared error of the hidden state behind every layer."""
        by_context: dict[str, list[torch.Tensor]] = {"nll": [], "excess": [], "kl": []}
        errors: list[torch.Tensor] = []
        for session, exact, hidden in zip(self.sessions, self.exact, self.hidden, strict=True):
            found = session.run(method.view(session.schedule), hidden=self.with_hidden)
            logs = found.logits.log_softmax(-1)
            targets = session.ids[:, -self.tail + 1 :, None]
            nll, base = (-x[:, :-1].gather(-1, targets)[..., 0].mean(1) for x in (logs, exact))
            by_context["nll"].append(nll)
            by_context["excess"].append(nll - base)
            by_context["kl"].append((exact.exp() * (exact - logs)).sum(-1).mean(1))
            squares = [
                torch.stack([(a - b).square().sum(), b.square().sum()])
                for a, b in zip(found.hidden, hidden, strict=True)
            ]
            errors.append(torch.stack(squares) if squares else torch.zeros(1, 2))
        out: dict[str, Any] = {name: vars(bootstrap(torch.cat(x).cpu().numpy())) for name, x in by_context.items()}
        e = out["nll"]
        out["perplexity"] = vars(Estimate(*(math.exp(e[name]) for name in ("mean", "low", "high"))))
        if self.with_hidden:
            error, energy = torch.stack(errors).sum(0).double().cpu().unbind(-1)
            out["hidden"] = (error / energy)[1:].tolist()
        return out
