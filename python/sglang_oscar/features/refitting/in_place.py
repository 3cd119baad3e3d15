"""New matrices in the place of old ones: CUDA graphs hold the addresses of tensors, and numbers as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from oscar_kernels.format import AnyFormat
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.cache import Int2Cache

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor in use, and what belongs into it."""


def replacements(cache: Int2Cache, formats: Mapping[int, AnyFormat]) -> list[Pair]:
    """All tensors that are made of the formats of a cache, with what new ones make of them; nothing is changed.

    Args:
        cache: of the server's model.
        formats: of its layers, of this rank's heads, on the CPU.

    Raises:
        Int2Error: a shape, or a number that is no tensor, is another one.
    """
    found: list[Pair] = []
    for layer_id, layer in cache.layers.items():
        parts, place = formats[layer_id].to(cache.seats.device).parts, f"layer {layer_id}"
        if len(parts) != len(layer.parts):
            raise Int2Error(f"a refit cannot cut layers elsewhere ({place}); start a server on files of a new fit")
        for part, new in zip(layer.parts, parts, strict=True):
            found += pairs(part.format, new, place)
            for made in cache.derived:
                for old, fresh in made(part, new):
                    found += pairs(old, fresh, place)
    return found


def pairs(old: Any, new: Any, place: str) -> Iterator[Pair]:
    """Tensors of two objects that are made alike, what they have worked out already with them.

    Args:
        old, new: records of records, tensors and numbers.
        place: of them, for the message.

    Raises:
        Int2Error: they are not alike.
    """
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if (old.shape, old.dtype) == (new.shape, new.dtype):
            yield old, new
            return
    elif is_dataclass(old) and type(old) is type(new):
        own = [field.name for field in fields(old)]
        for name in dict.fromkeys([*own, *vars(old)]):
            yield from pairs(getattr(old, name), getattr(new, name), f"{place}, {name}")
        return
    elif old == new:
        return
    raise Int2Error(
        f"a refit cannot replace {_said(old)} by {_said(new)} ({place}); start a server on files of a new fit"
    )


def _said(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else str(x)[:60]


def put(found: list[Pair], device: torch.device) -> None:
    """Write new matrices over the old ones."""
    for old, new in found:
        old.copy_(new)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
