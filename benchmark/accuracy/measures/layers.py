"""Errors of one layer at a time, from exact queries, keys and values (paper, figures 2, 3 and 8)."""

from __future__ import annotations

from typing import Any

import torch

from accuracy.attention import CacheView, composed_attention
from accuracy.host_memory import LayerActivations
from accuracy.methods.base import Method
from accuracy.reach import Reach
from accuracy.session import Session
from oscar_tools.evaluation.intervals import bootstrap

NAMES = ("k", "v", "logits", "mixed_values", "attention_kl", "attention_output")


class Layers:
    """Per-layer measurements on the contexts of a session.

    ``k``, ``v``: ||x - x^||^2 / ||x||^2 over the tokens behind the sink; ``logits``: the same of Q K^T over what each
    query reads quantized; ``mixed_values``: of S V with exact S; ``attention_kl``: mean KL(p || p^) of the attention
    distributions; ``attention_output``: of the attention block behind W_o, keys and values quantized.

    Args:
        session: its last tokens are the queries.
        queries: at most so many of them, evenly spaced, for what is queries x tokens large.
    """

    def __init__(self, session: Session, queries: int = 64) -> None:
        self.session = session
        self.activations = session.activations()
        m = self.activations[0][0].q.shape[2]
        self.rows = torch.linspace(0, m - 1, min(queries, m)).long()

    def measure(self, method: Method) -> dict[str, Any]:
        """name -> one value per layer, and ``intervals``: name -> interval of the mean over layers, by context."""
        view = method.view(self.session.schedule)
        per_layer = [self._layer(layer, method, view) for layer in range(len(self.activations))]
        out: dict[str, Any] = {name: [float(errors[name].mean()) for errors in per_layer] for name in NAMES}
        out["intervals"] = {
            name: vars(bootstrap(torch.stack([e[name] for e in per_layer]).mean(0).cpu().numpy())) for name in NAMES
        }
        return out

    def _layer(self, layer: int, method: Method, view: CacheView) -> dict[str, torch.Tensor]:
        host, module = self.activations[layer]
        x = LayerActivations(*(y.to(self.session.ids.device, non_blocking=True) for y in (host.q, host.k, host.v)))
        batch, n = x.k.shape[0], x.k.shape[2]
        if view.keys is None:
            return {name: torch.zeros(batch) for name in NAMES}
        assert view.key_exact_from is not None
        scale, reach = module.scaling, Reach.of(module)
        k, v = method.keys(layer, x.k), method.values(layer, x.v)
        group = x.q.shape[1] // k.shape[1]
        behind = slice(view.sink, None)
        errors = {
            "k": relative(k[:, :, behind], x.k[:, :, behind]),
            "v": relative(v[:, :, behind], x.v[:, :, behind]),
        }
        rows = self.rows.to(x.q.device)
        q = x.q[:, :, rows] * scale
        at = n - x.q.shape[2] + rows
        positions = torch.arange(n, device=q.device)
        key_from = view.key_exact_from.to(q.device)[at][:, None]
        coded = (positions >= view.sink) & (positions < key_from) & (positions <= at[:, None])
        exact_k, wide_k = (y.repeat_interleave(group, 1) for y in (x.k, k))
        true, seen = q @ exact_k.mT, q @ wide_k.mT
        seen = torch.where(coded, seen, true)
        errors["logits"] = relative(seen.masked_fill(~coded, 0), true.masked_fill(~coded, 0))
        future = positions > at[:, None]
        # A sink is one more outcome, which nothing is wrong about.
        true, seen = (reach.with_sinks(y.masked_fill(future, float("-inf"))) for y in (true, seen))
        errors["attention_kl"] = attention_kl(true, seen)
        exact_only_v = CacheView(None, view.values, view.sink, view.key_exact_from, view.value_exact_from)
        plain = composed_attention(layer, x.q, x.k, x.v, scale, CacheView(), reach)
        mixed = composed_attention(layer, x.q, x.k, x.v, scale, exact_only_v, reach)
        both = composed_attention(layer, x.q, x.k, x.v, scale, view, reach)
        errors["mixed_values"] = relative(mixed, plain)
        weight = module.o_proj.weight.float()
        errors["attention_output"] = relative(*(y.transpose(1, 2).flatten(2) @ weight.T for y in (both, plain)))
        return errors


def attention_kl(true: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """KL of two sets of logits by context, mean over heads and queries: [batch, heads, queries, n] -> [batch]."""
    p, other = true.log_softmax(-1), seen.log_softmax(-1)
    return (p.exp() * (p - other).nan_to_num(0)).sum(-1).mean((1, 2))


def relative(other: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||other - exact||^2 / ||exact||^2 by context: [batch, ...] -> [batch]."""
    return (other - exact).square().flatten(1).sum(1) / exact.square().flatten(1).sum(1).clamp_min(1e-30)
