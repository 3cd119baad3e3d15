"""What stored keys, or stored values, of one layer cost the whole model: the KL of what it says next.

An error of the attention output is what a layer makes; what becomes of it is up to the layers behind. Here the model
itself reads one layer as a server gives it back while it decodes, all others exactly, and its next-token distributions
are compared with those of an exact cache. The costs of single sides add up to that of all of them together, about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.errors import DumpError, first_line
from oscar_rotation.fit.layer import Progress
from oscar_rotation.math.attention_weights import RECENT, SINK
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rope import overridden

ATTENTION = "oscar_one_layer"
"""Name under which transformers finds :func:`attend`."""

BATCH = 4
"""Sequences that are computed together."""

Read = Callable[[torch.Tensor], torch.Tensor]
"""[batch, kv_heads, n, head_dim] -> float32 of that shape, as a cache gives it back."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")
"""Arguments of an attention function that ask for more than a softmax of scaled products over all that came before."""

_stored: tuple[int, int, Read] | None = None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: q [batch, q_heads, m, d], k and v [batch, kv_heads, n, d].

    Raises:
        ValueError: the model's attention is more than this one.
    """
    odd = [name for name in UNKNOWN if others.get(name) is not None]
    if odd:
        raise ValueError(f"its attention has {odd[0]}, which --text does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _stored is None or _stored[0] != module.layer_idx:
        group, (m, n) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (key, value))
        mask = torch.ones(m, n, dtype=torch.bool, device=query.device).tril(n - m)
        out = torch.nn.functional.scaled_dot_product_attention(query, wide_k, wide_v, attn_mask=mask, scale=scale)
    else:
        _, side, read = _stored
        out = stored_attention(query, key, value, scale, *((read, None) if side == 0 else (None, read)))
    return out.to(query.dtype).transpose(1, 2), None


def stored_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, read_k: Read | None, read_v: Read | None
) -> torch.Tensor:
    """Attention of the last m of n tokens while they are decoded: sink and recent window exactly, rows between.

    Args:
        q: [batch, q_heads, m, d].
        k, v: [batch, kv_heads, n, d].
        scale: factor on the logits.
        read_k, read_v: what a cache gives back; None reads exactly.

    Returns:
        float32 [batch, q_heads, m, d].
    """
    m, (heads, n) = q.shape[2], k.shape[1:3]
    wide = q.float().unflatten(1, (heads, -1)) * scale
    k, v = k.float(), v.float()
    positions = torch.arange(n, device=q.device)
    away = positions[n - m :, None] - positions
    between = (away >= RECENT) & (positions >= SINK)
    scores = wide @ k[:, :, None].mT
    if read_k is not None:
        scores = torch.where(between, wide @ read_k(k)[:, :, None].mT, scores)
    p = scores.masked_fill_(away < 0, float("-inf")).softmax(-1)
    out = p @ v[:, :, None]
    if read_v is not None:
        out += p.masked_fill(~between, 0) @ (read_v(v) - v)[:, :, None]
    return out.flatten(1, 2)


@contextmanager
def _one_layer(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _storing(layer: int, side: int, read: Read) -> Iterator[None]:
    global _stored
    _stored = layer, side, read
    try:
        yield
    finally:
        _stored = None


@torch.no_grad()
def model_losses(
    model: Any,
    ids: torch.Tensor,
    reads: Sequence[tuple[Read, Read]],
    tail: int,
    positions: Positions | None = None,
    progress: Progress | None = None,
) -> torch.Tensor:
    """KL, exact || stored, of the last tokens' next-token distributions with one side of one layer stored at a time.

    In memory are the model, exact keys, values and log-probabilities of :data:`BATCH` sequences.

    Args:
        model: a causal language model of transformers, on the device to compute on.
        ids: int64 [sequences, n].
        reads: of keys and of values, by layer.
        tail: of each sequence, the tokens that are compared.
        positions: that sequences are spread over; None for the first ones.
        progress: told about every side of every layer.

    Returns:
        float64 [layers, 2] in nats per token, keys first.

    Raises:
        ValueError: the model's attention is more than a softmax of scaled products.
    """
    from transformers import DynamicCache

    count, n = ids.shape
    prompt, layers = n - tail, len(reads)
    offsets = torch.zeros(count, dtype=torch.int64) if positions is None else positions.offsets(n, count)
    batches = list(zip(ids.split(BATCH), offsets.split(BATCH), strict=True))
    total, done = torch.zeros(layers, 2, dtype=torch.float64), 0
    with _one_layer(model):
        for part, begin in batches:
            tokens = part.to(model.device)
            places = (begin[:, None] + torch.arange(n)).to(model.device)
            cache: Any = DynamicCache()
            at = {"use_cache": True, "past_key_values": cache, "position_ids": places[:, :prompt]}
            model(tokens[:, :prompt], logits_to_keep=1, **at)
            known = [(layer.keys, layer.values) for layer in cache.layers]

            def said() -> torch.Tensor:
                again: Any = DynamicCache()
                for number, pair in enumerate(known):  # noqa: B023 (called before the next batch)
                    again.update(*pair, number)
                at = {"use_cache": True, "past_key_values": again, "position_ids": places[:, prompt:]}  # noqa: B023
                return model(tokens[:, prompt:], **at).logits.float().log_softmax(-1)  # noqa: B023

            exact = said()
            for layer in range(layers):
                for side in (0, 1):
                    with _storing(layer, side, reads[layer][side]):
                        moved = said()
                    total[layer, side] += float((exact.exp() * (exact - moved)).sum(-1).mean(-1).sum())
                    done += 1
                    if progress is not None:
                        progress(done, 2 * layers * len(batches))
    return (total / count).clamp_min(0)


def load_model(folder: Path, device: torch.device, overrides: Mapping[str, Any] | None = None) -> Any:
    """A causal language model to measure with: in float32 where the device has room for it, else as it was saved.

    Args:
        folder: of its weights.
        device: to put it on.
        overrides: of its configuration, as SGLang's ``--json-model-override-args``.

    Raises:
        DumpError: transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        if overrides:
            config = type(config).from_dict(overridden(config.to_dict(), overrides))
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="auto").eval()
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise DumpError(f"{folder}: --text needs a model that transformers loads ({first_line(error)})") from error
    wide = 4 * sum(parameter.numel() for parameter in model.parameters())
    if device.type != "cuda" or wide < 0.6 * torch.cuda.mem_get_info(device)[0]:
        model = model.float()
    return model.to(device)
