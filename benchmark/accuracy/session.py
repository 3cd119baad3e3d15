"""A batch of sequences whose exact beginning is computed once and read through any number of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from accuracy.attention import Alike, CacheView, Schedule, reading
from accuracy.host_memory import LayerActivations, parked
from accuracy.layer_kinds import has_linear_layers


@dataclass(frozen=True)
class Tail:
    """What the last m of n tokens gave.

    Attributes:
        states: behind the last norm, [batch, m, hidden]; logits are hundreds of times larger and made where they are
            looked at.
        head: output matrix of the model.
        hidden: hidden states behind the embedding and behind every layer, each [batch, m, hidden]; empty unless asked.
    """

    states: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    hidden: tuple[torch.Tensor, ...] = ()

    @property
    def logits(self) -> torch.Tensor:
        """[batch, m, vocabulary] float32."""
        return self.head(self.states).float()

    def split(self, count: int) -> list[Tail]:
        """The same, ``count`` sequences at a time, without ``hidden``."""
        return [Tail(states, self.head) for states in self.states.split(count)]


class Session:
    """Sequences of one length and schedule.

    Whatever the method, tokens that find an empty cache before them compute the same; their keys and values are kept,
    in host memory, and the rest is run per method. Sequences that begin alike share them. Models with linear layers are
    run from the beginning, and tell as much as others.

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
        if has_linear_layers(model):
            self.first = 0  # not every release of transformers goes on from the state of a linear layer
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.alike: Alike | None = None
        if self.first:
            cache = DynamicCache()
            beginnings, self.which = self.ids[:, : self.first].unique(dim=0, return_inverse=True)
            if len(beginnings) < len(ids):
                firsts = [int((self.which == n).nonzero()[0]) for n in range(len(beginnings))]
                self.alike = Alike(self.first, torch.tensor(firsts, device=self.which.device), self.which)
            with reading(model, CacheView()):
                model.model(beginnings, past_key_values=cache, use_cache=True)
            for layer in cache.layers:
                self.prefix.append((parked(layer.keys, model.device), parked(layer.values, model.device)))
                layer.keys = layer.values = None

    @torch.no_grad()
    def run(self, view: CacheView, hidden: bool = False) -> Tail:
        """The tokens behind the exact beginning, through ``view``."""
        cache = DynamicCache() if self.prefix else None
        for layer, both in enumerate(self.prefix):
            cache.update(*(x.to(self.model.device, non_blocking=True)[self.which] for x in both), layer)
        with reading(self.model, replace(view, alike=self.alike)):
            out = self.model.model(
                self.ids[:, self.first :],
                past_key_values=cache,
                use_cache=cache is not None,
                output_hidden_states=hidden,
            )
        told = slice(self.told - self.first, None)
        states = tuple(x[:, told] for x in out.hidden_states) if hidden else ()
        return Tail(out.last_hidden_state[:, told], self.model.get_output_embeddings(), states)

    def activations(self) -> list[tuple[LayerActivations, Any]]:
        """Exact q of the last m tokens, k and v of all, [batch, heads, tokens, d], in host memory, and the module, by
        layer."""
        found: list[tuple[LayerActivations, Any]] = []

        def observe(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: Any) -> None:
            parts = (q[:, :, self.told - self.first :], k, v)
            found.append((LayerActivations(*(parked(x.float(), x.device) for x in parts)), module))

        self.run(CacheView(observe=observe))
        return found
