"""What a method may see before it is used: activations of calibration text and the weights that read values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accuracy.attention import CacheView, reading
from accuracy.host_memory import LayerActivations, ParkedLayers
from accuracy.reach import Reach
from oscar_rotation.fit.output_weights import reader_of
from oscar_rotation.math.covariance import CovarianceAccumulator
from oscar_rotation.math.positions import Positions


@dataclass(frozen=True)
class Calibration:
    """Activations of all layers over sequences of one length.

    Attributes:
        layers: per layer; on a GPU they wait in host memory and are copied when they are asked for.
        seq_lens: lengths of the sequences, which lie one after the other.
        sinks: per layer [q_heads], sink logits; None for a layer without. Empty for none at all.
        readers: per layer W_o W_o^T by kv head, summed over its query heads: float32 [kv_heads, d, d].
        rotary: n -> cosines and sines of the rotary embedding of positions 0 .. n-1, [n, d] each.
        context: positions that the recipes fit for by default.
        known: what was computed from these activations, so that methods that need the same fit it once.
        model, ids: that they are of; int64 [sequences, n].
        head_dim, kv_heads: geometry.
    """

    layers: Sequence[LayerActivations]
    seq_lens: list[int]
    readers: list[torch.Tensor]
    rotary: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    context: int = 0
    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    model: Any = None
    ids: torch.Tensor | None = None
    sinks: Sequence[torch.Tensor | None] = ()

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.readers[0].shape[-1]

    @property
    def kv_heads(self) -> int:
        """kv heads of a layer."""
        return self.readers[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the activations are used."""
        return self.readers[0].device

    def sink_logits(self, layer: int) -> torch.Tensor | None:
        """Of a layer, [q_heads]; None for one without."""
        return self.sinks[layer] if self.sinks else None

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it gave when ``key`` was asked for before."""
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]

    def accumulated(self, layer: int, key: Hashable, make: Callable[[], Any]) -> Any:
        """An accumulator that ``make`` builds, over all sequences of a layer; ``key`` names it."""

        def fill() -> Any:
            accumulator, x = make(), self.layers[layer]
            accumulator.update(x.q, x.k, x.v, self.seq_lens)
            return accumulator

        return self.once((layer, key), fill)

    def positions(self, context: int | None) -> Positions | None:
        """Positions of a context, None for the model's, under its rotary embedding; None where the context is 0."""
        context = self.context if context is None else context
        if not context:
            return None
        cos, sin = (table[1].double() for table in self.rotary(2))
        return Positions(torch.atan2(sin, cos)[: len(cos) // 2].cpu(), context)

    def covariance(self, layer: int, kind: Callable[..., CovarianceAccumulator]) -> CovarianceAccumulator:
        """A target of :mod:`oscar_rotation.math.covariance` over all sequences of a layer."""
        return self.accumulated(layer, kind, lambda: kind(self.kv_heads, self.head_dim, self.device))

    def first(self, sequences: int) -> Calibration:
        """The same with the first ``sequences`` only."""
        tokens = sum(self.seq_lens[:sequences])
        parts = (LayerActivations(x.q[:tokens], x.k[:tokens], x.v[:tokens]) for x in self.layers)
        layers = ParkedLayers(parts, self.device)
        ids = None if self.ids is None else self.ids[:sequences]
        return Calibration(
            layers,
            self.seq_lens[:sequences],
            self.readers,
            self.rotary,
            self.context,
            model=self.model,
            ids=ids,
            sinks=self.sinks,
        )


@torch.no_grad()
def calibrate(model: Any, ids: torch.Tensor, batch: int = 8) -> Calibration:
    """Run calibration text through a model and keep what its attention layers see.

    Args:
        model: a Hugging Face causal language model.
        ids: [sequences, n].
        batch: sequences at a time.
    """
    parts: dict[int, list[LayerActivations]] = {}
    readers: dict[int, torch.Tensor] = {}
    sinks: dict[int, torch.Tensor | None] = {}

    def observe(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, module: Any) -> None:
        flat = [x.float().transpose(1, 2).flatten(0, 1).cpu() for x in (q, k, v)]
        parts.setdefault(layer, []).append(LayerActivations(*flat))
        readers.setdefault(layer, reader_of(module.o_proj.weight, k.shape[1], k.shape[3]))
        sinks[layer] = Reach.of(module).sinks

    def rotary(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions, embedding = torch.arange(n, device=model.device)[None], model.model.rotary_emb
        # Where kinds of layers have embeddings of their own, it is asked for one.
        kind = {"layer_type": "full_attention"} if hasattr(embedding, "layer_types") else {}
        tables = [x[0] for x in embedding(torch.zeros(1, device=model.device), positions, **kind)]
        half = tables[0].shape[-1] // 2
        if not torch.equal(tables[0][:, :half], tables[0][:, half:]):  # gpt-oss has each angle once
            tables = [torch.cat([x, x], -1) for x in tables]
        return tables[0], tables[1]

    for chunk in ids.split(batch):
        with reading(model, CacheView(observe=observe)):
            model.model(chunk.to(model.device), use_cache=False)
    joined = (
        LayerActivations(*(torch.cat([getattr(part, name) for part in found]) for name in ("q", "k", "v")))
        for found in (parts.pop(layer) for layer in sorted(parts))
    )
    layers = ParkedLayers(joined, model.device)
    numbers = range(len(layers))
    return Calibration(
        layers,
        [ids.shape[1]] * len(ids),
        [readers[layer] for layer in numbers],
        rotary,
        model.config.max_position_embeddings,
        model=model,
        ids=ids,
        sinks=[sinks[layer] for layer in numbers],
    )
