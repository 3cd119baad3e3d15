"""What an INT2 cache does to the model: exact window semantics of the server, in a batch of equal-length prompts.

A chunk of a prompt attends to itself exactly and to what was cached before it as the cache holds it: the first
``sink`` tokens and the last ``recent`` ones in BF16, everything between through the INT2 codec. A decoded token is
stored first and then reads everything that way, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from oscar_kernels.cache import Windows, split_positions
from oscar_kernels.codec import clip, dequantize, quantize
from reference_model.model import ReferenceModel, causal_attention


@dataclass(frozen=True)
class Recipe:
    """How keys and values are cached.

    Shapes: k_rotation, v_rotation [layers, head_dim, head_dim]; None for the identity. ``group`` 0 means that
    nothing is quantized (the BF16 cache).
    """

    name: str
    group: int
    k_rotation: torch.Tensor | None = None
    v_rotation: torch.Tensor | None = None
    k_clip: float = 0.96
    v_clip: float = 0.92
    sink: int = 64
    recent: int = 256


BF16 = Recipe("bf16", group=0)


def baselines(group: int, head_dim: int, layers: int, device: torch.device) -> list[Recipe]:
    """Naive INT2, the same with windows and clip, and QuaRot-style INT2 (Hadamard, windows and clip)."""
    hadamard = sylvester(head_dim, device).expand(layers, -1, -1)
    return [
        Recipe("naive", group, k_clip=1.0, v_clip=1.0, sink=0, recent=0),
        Recipe("identity+windows", group),
        Recipe("quarot", group, hadamard, hadamard),
    ]


def sylvester(d: int, device: torch.device) -> torch.Tensor:
    """Normalized Hadamard matrix [d, d]."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / d**0.5


def covariance_rotation(cov: torch.Tensor, descending: bool = False) -> torch.Tensor:
    """R = U H P of a second moment: [d, d] -> float32 [d, d]. See docs/design.md for why the order matters."""
    d = cov.shape[0]
    vectors = torch.linalg.eigh(cov.double()).eigenvectors.float()
    if descending:
        vectors = vectors.flip(1)
    bits = d.bit_length() - 1
    reverse = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(d)]
    return (vectors @ sylvester(d, cov.device))[:, reverse]


@torch.no_grad()
def second_moments(model: ReferenceModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Covariances of post-RoPE queries ("q"), keys ("k") and of attention outputs ("s": V^T S^T S V).

    Args:
        ids: [batch, n].

    Returns:
        name -> float32 [layers, d, d].
    """
    found: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "s": []}

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = causal_attention(layer, q, k, v)
        for name, x in (("q", q), ("k", k), ("s", out)):
            flat = x.float().flatten(0, 2)
            found[name].append(flat.T @ flat / flat.shape[0])
        return out

    model.model(ids, attention=attention)
    return {name: torch.stack(per_layer) for name, per_layer in found.items()}


class SimulatedCache:
    """Cache of a batch whose requests all have the same length.

    Args:
        model: the model, in the dtype in which it is to run.
        recipe: how to cache.
    """

    def __init__(self, model: ReferenceModel, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.windows = Windows(recipe.sink, recipe.recent, recipe.recent)
        self.length = 0
        self.ring_start = 0
        self.exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.coded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def extend(self, ids: torch.Tensor) -> torch.Tensor:
        """Run ids [batch, n] behind what is cached; logits of the last position [batch, vocab]."""
        hidden = self.model.model(ids, start=self.length, attention=self._attend)
        self.length += ids.shape[1]
        return functional.linear(hidden[:, -1], self.model.model.embed_tokens.weight).float()

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[2]
        key_rotation = None if self.recipe.k_rotation is None else self.recipe.k_rotation[layer]
        value_rotation = None if self.recipe.v_rotation is None else self.recipe.v_rotation[layer]
        own = (_rotate(k, key_rotation), _rotate(v, value_rotation))
        past = self._view(layer, self.length) if self.length and n > 1 else None
        self._store(layer, own)
        if n > 1 and past is None:
            return causal_attention(layer, q, k, v)
        keys, values = self._view(layer, self.length + 1) if past is None else _join(past, own)
        queries = _rotate(q, key_rotation).unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("bhgqd,bhtd->bhgqt", queries, keys) * q.shape[-1] ** -0.5
        later = torch.ones(n, keys.shape[2], dtype=torch.bool, device=q.device).triu(self.length + 1)
        mixed = torch.einsum("bhgqt,bhtd->bhgqd", scores.masked_fill(later, float("-inf")).softmax(-1), values)
        mixed = mixed.flatten(1, 2)
        return (mixed if value_rotation is None else mixed @ value_rotation.T).to(q.dtype)

    def _store(self, layer: int, own: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Append rotated keys and values [batch, kv_heads, n, d], in BF16 and as the codec gives them back."""
        windowed = (own[0].bfloat16(), own[1].bfloat16())
        self.exact[layer] = _join(self.exact.get(layer), windowed)
        if self.recipe.group:
            clips = (self.recipe.k_clip, self.recipe.v_clip)
            coded = [dequantize(*quantize(clip(y, c), self.recipe.group)) for y, c in zip(own, clips, strict=True)]
            self.coded[layer] = _join(self.coded.get(layer), (coded[0], coded[1]))

    def _view(self, layer: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions [0, kv_len) as attention reads them: float32 [batch, kv_heads, kv_len, d]."""
        exact = self.exact[layer]
        if not self.recipe.group:
            return exact[0].float(), exact[1].float()
        begin, end = split_positions(kv_len, self.ring_start, self.windows)
        pairs = zip(exact, self.coded[layer], strict=True)
        k, v = (torch.cat([e[:, :, :begin].float(), c[:, :, begin:end], e[:, :, end:].float()], 2) for e, c in pairs)
        return k, v


def _rotate(x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    return x.float() if rotation is None else x.float() @ rotation


def _join(
    past: tuple[torch.Tensor, torch.Tensor] | None, own: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return own if past is None else (torch.cat([past[0], own[0]], 2), torch.cat([past[1], own[1]], 2))


def greedy(model: ReferenceModel, recipe: Recipe, prompts: torch.Tensor, steps: int, prefix: int = 0) -> torch.Tensor:
    """Greedy continuation.

    Args:
        prompts: int64 [batch, n].
        steps: tokens to generate.
        prefix: tokens that come from the prefix cache. They were computed exactly, and the request's recent window
            holds nothing of them. 0: the whole prompt is one chunk.

    Returns:
        int64 [batch, steps].
    """
    cache = SimulatedCache(model, recipe)
    if prefix:
        cache.extend(prompts[:, :prefix])
        cache.ring_start = prefix
    logits = cache.extend(prompts[:, prefix:])
    out = []
    for step in range(steps):
        out.append(logits.argmax(-1, keepdim=True))
        if step + 1 < steps:
            logits = cache.extend(out[-1])
    return torch.cat(out, 1)


def fitted(moments: dict[str, torch.Tensor], group: int) -> list[Recipe]:
    """OSCAR in both eigenvector orders, and K^T K instead of Q^T Q for the keys."""
    v = torch.stack([covariance_rotation(c) for c in moments["s"]])
    k = torch.stack([covariance_rotation(c) for c in moments["q"]])
    oscar = Recipe("oscar", group, k, v)
    down_k = torch.stack([covariance_rotation(c, descending=True) for c in moments["q"]])
    down_v = torch.stack([covariance_rotation(c, descending=True) for c in moments["s"]])
    ktk = torch.stack([covariance_rotation(c, descending=True) for c in moments["k"]])
    return [
        oscar,
        replace(oscar, name="oscar descending", k_rotation=down_k, v_rotation=down_v),
        replace(oscar, name="k^t k", k_rotation=ktk),
    ]
