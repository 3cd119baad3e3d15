"""Attention layers of a loaded model are those that the cache was made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from oscar_kernels.format import LayerFormat, SideFormat
from sglang_oscar.attach import refusals
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.attention.query_heads import query_heads
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.build import check_layers

FORMATS = {layer: LayerFormat(2, 128, SideFormat(128), SideFormat(128)) for layer in (0, 3)}


def model(*layers: RadixAttention) -> nn.Module:
    return nn.ModuleList(layers)


def attention(
    layer_id: int, kv_heads: int = 2, head_dim: int = 128, v_head_dim: int = -1, q_heads: int = 8
) -> RadixAttention:
    return RadixAttention(q_heads, head_dim, 0.1, kv_heads, layer_id, v_head_dim=v_head_dim)


def test_layers_with_the_heads_of_the_configuration() -> None:
    check_layers(model(attention(0), attention(3)), FORMATS)
    check_layers(model(attention(0), attention(3), attention(1, kv_heads=4)), FORMATS, {1})


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        ([attention(0)], "the model has 1 for 2"),
        ([attention(0), attention(3), attention(3)], "the model has 3 for 2"),
        ([attention(0), attention(3, kv_heads=4)], "layer 3 has 4 of 128 channels, the configuration says 2 of 128"),
        ([attention(0), attention(3, head_dim=64)], "layer 3 has 2 of 64 channels"),
        ([attention(0), attention(3, v_head_dim=64)], "layer 3 has 2 of 128 channels"),
    ],
)
def test_other_layers_are_refused(layers: list[RadixAttention], fault: str) -> None:
    with pytest.raises(Int2Error, match=fault):
        check_layers(model(*layers), FORMATS)


def test_query_heads_are_those_of_layers_with_a_cache() -> None:
    """A layer with a window may have others; layers that share kernels may not."""
    mixed = model(attention(0), attention(1, q_heads=12), attention(3))
    assert query_heads(mixed, FORMATS) == 8
    with pytest.raises(Int2Error, match=r"same query heads .* 8 in layer 0, 12 in layer 1; use"):
        query_heads(mixed, (0, 1))
    with pytest.raises(Int2Error, match="has none"):
        query_heads(mixed, (2,))


def test_kernels_for_other_groups_are_never_called() -> None:
    """They would answer, with the wrong kv heads of queries."""
    backend: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    backend.q_heads = 8
    with pytest.raises(Int2Error, match="compiled for 8 query heads, layer 1 has 12"):
        backend.forward_decode(torch.zeros(1, 1536), torch.zeros(1, 256), None, attention(1, q_heads=12), None)


@pytest.mark.parametrize("sparse", [True, False, None])
def test_block_sparse_models_are_refused_by_what_their_configuration_says(sparse: bool | None) -> None:
    """Not all releases have such configurations."""
    known = {} if sparse is None else {"has_minicpm_sparse_attention": sparse}
    config = SimpleNamespace(architectures=["MiniCPMForCausalLM"], **known)
    (refused,) = [row for row, what in refusals.MODELS if what == "block-sparse attention models"]
    assert refused(SimpleNamespace(hf_config=config)) == bool(sparse)
