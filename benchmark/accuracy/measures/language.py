"""Perplexity at the end of long contexts, and how far the next-token distribution moves."""

from __future__ import annotations

import math
from typing import Any

import torch

from accuracy.attention import prefill_then_decode
from accuracy.methods.base import Method
from accuracy.methods.bf16 import Bf16
from accuracy.session import Session
from oscar_tools.evaluation.intervals import Estimate, bootstrap

MOST_LOGITS = 1 << 27
"""At a time: 512 MB in float32, and what is computed of them is several times that."""


class Language:
    """Teacher-forced decoding of the last ``tail`` tokens of every context.

    Args:
        model: the model.
        ids: int64 [contexts, n].
        tail: decoded tokens; the rest is the prompt, computed in one chunk.
        batch: contexts at a time; 0 for all.
    """

    def __init__(self, model: Any, ids: torch.Tensor, tail: int, batch: int = 0) -> None:
        schedule = prefill_then_decode(ids.shape[1], ids.shape[1] - tail)
        self.tail = tail
        self.sessions = [Session(model, part, schedule) for part in ids.split(batch or len(ids))]
        self.exact = [session.run(Bf16().view(schedule)) for session in self.sessions]
        self.at_once = max(1, MOST_LOGITS // (tail * model.config.get_text_config().vocab_size))

    def measure(self, method: Method) -> dict[str, Any]:
        """``nll`` and ``excess`` (over BF16) in nats per token, ``perplexity``, ``kl`` (BF16 || method), each by
        context with an interval."""
        by_context: dict[str, list[torch.Tensor]] = {"nll": [], "excess": [], "kl": []}
        for session, exact in zip(self.sessions, self.exact, strict=True):
            found = session.run(method.view(session.schedule))
            parts = (x.split(self.at_once) for x in (session.ids, found, exact))
            for ids, *tails in zip(*parts, strict=True):
                logs, base = (tail.logits.log_softmax(-1) for tail in tails)
                targets = ids[:, -self.tail + 1 :, None]
                nll, least = (-x[:, :-1].gather(-1, targets)[..., 0].mean(1) for x in (logs, base))
                by_context["nll"].append(nll)
                by_context["excess"].append(nll - least)
                by_context["kl"].append((base.exp() * (base - logs)).sum(-1).mean(1))
        out: dict[str, Any] = {name: vars(bootstrap(torch.cat(x).cpu().numpy())) for name, x in by_context.items()}
        e = out["nll"]
        out["perplexity"] = vars(Estimate(*(math.exp(e[name]) for name in ("mean", "low", "high"))))
        return out

    def hidden(self, method: Method) -> list[float]:
        """Relative squared error of the hidden state behind every layer; exact ones are computed again."""
        errors = []
        for session in self.sessions:
            exact, found = (session.run(of.view(session.schedule), hidden=True).hidden for of in (Bf16(), method))
            squares = [
                torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in zip(found, exact, strict=True)
            ]
            errors.append(torch.stack(squares))
        error, energy = torch.stack(errors).sum(0).double().cpu().unbind(-1)
        return (error / energy)[1:].tolist()
