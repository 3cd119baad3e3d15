"""Absorbing the value rotation into a small attention block equals rotating values and outputs online."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from oscar_rotation.load import recipe_rotation
from sglang_oscar.weights.absorption import rotate_output_columns, rotate_value_rows

HIDDEN, HEAD_DIM, TOKENS = 96, 64, 12


@dataclass
class Linear:
    """A projection with the attributes of SGLang's, for one tensor-parallel rank."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    q_proj_shard_size: int = 0
    kv_proj_shard_size: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass
class Block:
    """Attention with grouped queries; ``rotation`` is the one applied online, or None."""

    qkv: Linear
    o_proj: Linear
    q_heads: int
    kv_heads: int

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)[:, (self.q_heads + self.kv_heads) * HEAD_DIM :].view(TOKENS, self.kv_heads, HEAD_DIM)

    def __call__(self, x: torch.Tensor, rotation: torch.Tensor | None = None) -> torch.Tensor:
        qkv = self.qkv(x)
        sizes = [self.q_heads * HEAD_DIM, self.kv_heads * HEAD_DIM, self.kv_heads * HEAD_DIM]
        q, k, v = (part.view(TOKENS, -1, HEAD_DIM).transpose(0, 1) for part in qkv.split(sizes, dim=1))
        if rotation is not None:
            v = v @ rotation  # [kv_heads, tokens, head_dim]: one for all, or one for each kv head
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if rotation is not None:
            per_head = rotation.expand(self.kv_heads, HEAD_DIM, HEAD_DIM)
            out = out @ per_head.mT.repeat_interleave(self.q_heads // self.kv_heads, 0)
        return self.o_proj(out.transpose(0, 1).reshape(TOKENS, -1))


def block(q_heads: int, kv_heads: int, bias: bool, dtype: torch.dtype) -> Block:
    torch.manual_seed(q_heads * 10 + kv_heads)
    rows = (q_heads + 2 * kv_heads) * HEAD_DIM
    qkv = Linear(
        torch.randn(rows, HIDDEN).to(dtype) / 8,
        torch.randn(rows).to(dtype) if bias else None,
        q_heads * HEAD_DIM,
        kv_heads * HEAD_DIM,
    )
    return Block(qkv, Linear(torch.randn(HIDDEN, q_heads * HEAD_DIM).to(dtype) / 8, None), q_heads, kv_heads)


@pytest.fixture
def rotation() -> torch.Tensor:
    """A random orthogonal matrix: unlike Hadamard's it is not symmetric, so a transpose too many shows."""
    return torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(5)))[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
def test_absorbed_equals_online(q_heads: int, kv_heads: int, bias: bool, rotation: torch.Tensor) -> None:
    """With and without grouped queries and bias; and the cached values are the rotated ones."""
    module = block(q_heads, kv_heads, bias, torch.float32)
    x = torch.randn(TOKENS, HIDDEN)
    plain, online, values = module(x), module(x, rotation), module.values(x)
    untouched = module.qkv.weight[: (q_heads + kv_heads) * HEAD_DIM].clone()
    rotate_value_rows(module.qkv, rotation)
    rotate_output_columns(module.o_proj, rotation)
    torch.testing.assert_close(module(x), online, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module(x), plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.values(x), values @ rotation, rtol=1e-4, atol=1e-4)
    assert torch.equal(module.qkv.weight[: (q_heads + kv_heads) * HEAD_DIM], untouched)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (4, 2), (6, 3)])
def test_every_kv_head_absorbs_its_own(q_heads: int, kv_heads: int, bias: bool) -> None:
    """Not orthogonal either: values by the matrices, outputs of a kv head's queries by its dual."""
    generator = torch.Generator().manual_seed(6)
    bases = torch.linalg.qr(torch.randn(kv_heads, HEAD_DIM, HEAD_DIM, generator=generator))[0]
    spread = torch.linspace(0.5, 2.0, HEAD_DIM)
    matrices, duals = bases * spread, bases / spread
    module = block(q_heads, kv_heads, bias, torch.float32)
    x = torch.randn(TOKENS, HIDDEN)
    plain, values = module(x), module.values(x)
    rotate_value_rows(module.qkv, matrices)
    rotate_output_columns(module.o_proj, duals)
    torch.testing.assert_close(module(x), plain, rtol=1e-4, atol=1e-4)
    for head in range(kv_heads):
        torch.testing.assert_close(module.values(x)[:, head], values[:, head] @ matrices[head], rtol=1e-4, atol=1e-4)


def test_online_equals_absorbed_per_head() -> None:
    """The online form that the test above is about, written out once."""
    module = block(4, 2, False, torch.float32)
    rotations = torch.linalg.qr(torch.randn(2, HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(7)))[0]
    x = torch.randn(TOKENS, HIDDEN)
    online = module(x, rotations)
    rotate_value_rows(module.qkv, rotations)
    rotate_output_columns(module.o_proj, rotations)
    torch.testing.assert_close(module(x), online, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["values", "outputs"])
def test_half_an_absorption_shows(side: str, rotation: torch.Tensor) -> None:
    """Rotating only one of the two projections changes the output: the comparison above can fail."""
    module = block(4, 2, True, torch.float32)
    x = torch.randn(TOKENS, HIDDEN)
    plain = module(x)
    if side == "values":
        rotate_value_rows(module.qkv, rotation)
    else:
        rotate_output_columns(module.o_proj, rotation)
    assert (module(x) - plain).abs().max() > 0.1


def test_bfloat16_weights_keep_their_precision(rotation: torch.Tensor) -> None:
    """Rotated in float32 and rounded once: as far from the exact product as rounding is."""
    module = block(4, 2, True, torch.bfloat16)
    weight = module.qkv.weight[-2 * HEAD_DIM :].double()
    exact = (rotation.double().T @ weight.view(2, HEAD_DIM, HIDDEN)).view_as(weight)
    rotate_value_rows(module.qkv, rotation)
    assert module.qkv.weight.dtype == torch.bfloat16
    torch.testing.assert_close(module.qkv.weight[-2 * HEAD_DIM :].double(), exact, rtol=2**-8, atol=1e-4)


def test_shards_of_ranks_equal_the_whole(rotation: torch.Tensor) -> None:
    """Two ranks that rotate their own heads hold what one rank would hold of them."""
    whole = block(4, 2, False, torch.float32)
    before = whole.qkv.weight.clone()
    rotate_value_rows(whole.qkv, rotation)
    q, k, v = before.split([4 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
    for rank in range(2):
        parts = [part.chunk(2)[rank] for part in (q, k, v)]
        shard = Linear(torch.cat(parts).clone(), None, parts[0].shape[0], parts[1].shape[0])
        rotate_value_rows(shard, rotation)
        expected = whole.qkv.weight[-2 * HEAD_DIM :].chunk(2)[rank]
        torch.testing.assert_close(shard.weight[-HEAD_DIM:], expected, rtol=1e-5, atol=1e-5)


def test_hadamard_recipe_is_orthogonal() -> None:
    """What the server absorbs by default is its own inverse's transpose."""
    matrix = recipe_rotation("hadamard", num_layers=1, head_dim=HEAD_DIM, side="v").rotations[0]
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(HEAD_DIM), rtol=0, atol=1e-6)
