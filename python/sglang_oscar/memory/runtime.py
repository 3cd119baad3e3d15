"""State of int2 mode in one scheduler process: what the hooks and the attention backend share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.transform import SideTransform
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.requests.row_tables import RowTables
from sglang_oscar.requests.sink_store import SinkStore
from sglang_oscar.settings import Settings


@dataclass(frozen=True)
class LayerParams:
    """Constants of one layer.

    ``k_rotation`` and ``v_rotation`` are float32 [head_dim, head_dim] on the device, or None where nothing is to
    be rotated: for the identity, and for values whose rotation is absorbed into the weights. A transform need not be
    orthogonal: ``q_rotation`` is then the inverse transpose of ``k_rotation``, ``v_back`` that of ``v_rotation``, and
    None means that they are the same. ``k_center`` is float32 [kv_heads, head_dim] of this rank, subtracted from the
    transformed keys, or None. ``k_gain`` and ``v_gain`` are those of scales fitted to the codes,
    0 where scales are those of the range.
    """

    cache: LayerCache
    k_rotation: torch.Tensor | None
    v_rotation: torch.Tensor | None
    k_clip: float
    v_clip: float
    q_rotation: torch.Tensor | None = None
    v_back: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    k_gain: float = 0.0
    v_gain: float = 0.0

    @cached_property
    def format(self) -> LayerFormat:
        """The same as the kernels take it."""
        layout = self.cache.layout
        key = SideTransform(self.k_rotation, self.q_rotation, self.k_center, self.k_clip, self.k_gain)
        value = SideTransform(self.v_rotation, self.v_back, None, self.v_clip, self.v_gain)
        sides = (SideFormat(layout.group_size, layout.scale_dtype, layout.bits, of) for of in (key, value))
        return LayerFormat(layout.kv_heads, layout.head_dim, *sides)


@dataclass
class Runtime:
    """Everything int2 mode keeps in a scheduler process.

    ``layers`` is indexed by layer id; ``req_to_token_pool`` and ``page_size`` are SGLang's.
    """

    settings: Settings
    plan: MemoryPlan
    page_size: int
    req_to_token_pool: Any
    rows: RowTables
    sinks: SinkStore
    layers: list[LayerParams]

    def sink_key(self, req: Any) -> Hashable | None:
        """Key of a request's sink block; None if it is too short to have one or must not share it.

        A request with overridden embeddings does not have the content that its token ids say.
        """
        size = self.plan.geometry.windows.sink
        ids = list(req.origin_input_ids[:size])
        if len(ids) < size:
            ids += list(req.output_ids[: size - len(ids)])
        overridden = req.input_embeds is not None or req.positional_embed_overrides is not None
        if size == 0 or len(ids) < size or overridden or getattr(req, "skip_radix_cache_insert", False):
            return None
        return (req.extra_key, tuple(ids))


_current: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make ``runtime`` the one of this process."""
    global _current
    _current = runtime


def current() -> Runtime | None:
    """The runtime of this process, or None where int2 mode is off."""
    return _current
