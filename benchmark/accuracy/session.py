"""A batch of sequences whose exact beginning is computed once and read through any number of methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from accuracy.attention import CacheView, Schedule, all_layers_attend, reading
from accuracy.calibration import LayerActivations


@dataclass(frozen=True)
class Tail:
    """What the last m of n tokens gave.

    Attributes:
        logits: [batch, m, vocabulary] float32.
        hidden: hidden states behind the embedding and behind every layer, each [batch, m, hidden]; empty unless asked.
    """

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Session:
    """Sequences of one length and schedule.

    Whatever the method, tokens that find an empty cache before them compute the same; their keys and values are kept
    and the rest is run per method. Sequences that begin alike share them. Models with linear layers are run from the
    beginning, and tell as much as others.

    Args:
        model: a Hugging Face causal language model.
        ids: int64 [batch, n].
        schedule: of all sequences alike.
        told: first token that :meth:`run` tells about; by default the first that does not compute the same.
    """

    @torch.no_grad()
    def __init__(self, model: Any, ids: torch.Tensor, schedule: Schedule, told: int | None = None) -> None:
        self.model, self.schedule = model, schedule
        self.ids = ids.to(model.device)
        seen = (schedule.seen > 0).nonzero()
        self.first = min(int(seen[0]) if len(seen) else schedule.length - 1, schedule.decode_from)
        self.told = self.first if told is None else told
        self.first = min(self.first, self.told)
        if not all_layers_attend(model):
            self.first = 0  # not every release of transformers goes on from the state of a linear layer
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.first:
            cache = DynamicCache()
            beginnings, self.which = self.ids[:, : self.first].unique(dim=0, return_inverse=True)
            with reading(model, CacheView()):
                model.model(beginnings, past_key_values=cache, use_cache=True)
            self.prefix = [(layer.keys, layer.values) for layer in cache.layers]

    @torch.no_grad()
    def run(self, view: CacheView, hidden: bool = False) -> Tail:
        """The tokens behind the exact beginning, through ``view``."""
        cache = DynamicCache() if self.prefix else None
        for layer, (k, v) in enumerate(self.prefix):
            cache.update(k[self.which], v[self.which], layer)
        with reading(self.model, view):
            out = self.model(
                self.ids[:, self.first :],
                past_key_values=cache,
                use_cache=cache is not None,
                output_hidden_states=hidden,
                logits_to_keep=self.schedule.length - self.told,
            )
        told = slice(self.told - self.first, None)
        return Tail(out.logits.float(), tuple(x[:, told] for x in out.hidden_states) if hidden else ())

    def activations(self) -> list[tuple[LayerActivations, Any]]:
        """Exact q of the last m tokens, k and v of all, [batch, heads, tokens, d], and the module, layer by layer."""
        found: list[tuple[LayerActivations, Any]] = []

        def observe(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: Any) -> None:
            found.append((LayerActivations(q[:, :, self.told - self.first :].float(), k.float(), v.float()), module))

        self.run(CacheView(observe=observe))
        return found
