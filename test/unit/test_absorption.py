"""Absorbing the value rotation into a small attention block equals rotating values and outputs online."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from torch import nn

from oscar_rotation.load import recipe_rotation
from sglang_oscar.features.folding import absorption
from sglang_oscar.features.folding.absorption import rotate_output_columns, rotate_value_bias, rotate_value_rows

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


def rotate_values(qkv: Linear, matrix: torch.Tensor) -> None:
    """Rows, and the bias where there is one."""
    rotate_value_rows(qkv, matrix)
    if qkv.bias is not None:
        rotate_value_bias(qkv, matrix)


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
    rotate_values(module.qkv, rotation)
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
    rotate_values(module.qkv, matrices)
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
    rotate_values(module.qkv, rotations)
    rotate_output_columns(module.o_proj, rotations)
    torch.testing.assert_close(module(x), online, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["values", "outputs"])
def test_half_an_absorption_shows(side: str, rotation: torch.Tensor) -> None:
    """Rotating only one of the two projections changes the output: the comparison above can fail."""
    module = block(4, 2, True, torch.float32)
    x = torch.randn(TOKENS, HIDDEN)
    plain = module(x)
    if side == "values":
        rotate_values(module.qkv, rotation)
    else:
        rotate_output_columns(module.o_proj, rotation)
    assert (module(x) - plain).abs().max() > 0.1


def test_bfloat16_weights_keep_their_precision(rotation: torch.Tensor) -> None:
    """Rotated in float32 and rounded once: as far from the exact product as rounding is."""
    module = block(4, 2, True, torch.bfloat16)
    weight = module.qkv.weight[-2 * HEAD_DIM :].double()
    exact = (rotation.double().T @ weight.view(2, HEAD_DIM, HIDDEN)).view_as(weight)
    rotate_values(module.qkv, rotation)
    assert module.qkv.weight.dtype == torch.bfloat16
    torch.testing.assert_close(module.qkv.weight[-2 * HEAD_DIM :].double(), exact, rtol=2**-8, atol=1e-4)


def test_shards_of_ranks_equal_the_whole(rotation: torch.Tensor) -> None:
    """Two ranks that rotate their own heads hold what one rank would hold of them."""
    whole = block(4, 2, False, torch.float32)
    before = whole.qkv.weight.clone()
    rotate_values(whole.qkv, rotation)
    q, k, v = before.split([4 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM])
    for rank in range(2):
        parts = [part.chunk(2)[rank] for part in (q, k, v)]
        shard = Linear(torch.cat(parts).clone(), None, parts[0].shape[0], parts[1].shape[0])
        rotate_values(shard, rotation)
        expected = whole.qkv.weight[-2 * HEAD_DIM :].chunk(2)[rank]
        torch.testing.assert_close(shard.weight[-HEAD_DIM:], expected, rtol=1e-5, atol=1e-5)


def test_hadamard_recipe_is_orthogonal() -> None:
    """What the server absorbs by default is its own inverse's transpose."""
    matrix = recipe_rotation("hadamard", num_layers=1, head_dim=HEAD_DIM, side="v").rotations[0]
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(HEAD_DIM), rtol=0, atol=1e-6)


class Model(nn.Module):
    """Two layers, and weights beside them; ``load_weights`` writes the tensors that it is given, as SGLang's do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.blocks = [block(4, 2, bias, torch.float32) for _ in range(2)]
        self.head = torch.zeros(3)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"head": self.head}
        for number, layer in enumerate(self.blocks):
            begin = absorption.first_value_row(layer.qkv)
            found |= {f"{number}.qk": layer.qkv.weight[:begin], f"{number}.v": layer.qkv.weight[begin:],
                      f"{number}.o": layer.o_proj.weight}  # fmt: skip
            if layer.qkv.bias is not None:
                found[f"{number}.b"] = layer.qkv.bias[begin:]
        return found

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "broken":
                raise RuntimeError("a file ends early")
            self.tensors()[name].copy_(tensor)


def load(model: Model, weights: dict[str, torch.Tensor]) -> None:
    absorption.around_load_weights_and_postprocess(
        lambda one, given, _: one.load_weights(given.items()), model, weights, None
    )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, rotation: torch.Tensor) -> None:
    """int2 mode whose layers all have one rotation, not orthogonal."""
    value = SimpleNamespace(matrix=rotation * 2, reading=rotation / 2)
    settings = SimpleNamespace(absorb_v_rotation=True, v_rotation="file")
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(kv_cache_dtype="int2"))
    monkeypatch.setattr(absorption, "of_this_process", lambda: settings)
    monkeypatch.setattr(absorption, "obstacle", lambda *_: None)
    monkeypatch.setattr(absorption, "_value_transforms", lambda _, layers: [value] * len(layers))

    def layers(model: Any) -> list[tuple[Any, Any, Any]]:
        return [(one.qkv, None, one.o_proj) for one in model.blocks]

    monkeypatch.setattr(absorption, "attention_layers", layers)


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "update", [{"head"}, {"0.v"}, {"1.o", "head"}, {"0.qk"}, {"1.b", "0.o"}, {"0.v", "0.o", "1.v", "1.o"}, set("a")]
)
def test_an_update_of_some_tensors_rotates_those(update: set[str], bias: bool) -> None:
    """What a checkpoint leaves out keeps its rotation, once; what it brings gets one."""
    model, generator = Model(bias), torch.Generator().manual_seed(8)
    names = model.tensors()
    first, second = ({n: torch.randn(t.shape, generator=generator) for n, t in names.items()} for _ in range(2))
    load(model, first)
    before = copy_of(model.tensors())
    load(model, {name: tensor for name, tensor in second.items() if name in update or update == {"a"}})
    after = copy_of(model.tensors())
    load(model, second)
    whole = copy_of(model.tensors())
    for name in names:
        new = name in update or update == {"a"}
        assert torch.equal(after[name], whole[name] if new else before[name]), name
        assert new or not torch.equal(before[name], whole[name])


@pytest.mark.usefixtures("served")
def test_an_update_that_breaks_off_leaves_numbers() -> None:
    """SGLang reads the old weights once more then; until it has, nothing may be NaN."""
    model = Model(bias=True)
    weights = copy_of(model.tensors())
    load(model, weights)
    before = copy_of(model.tensors())
    with pytest.raises(RuntimeError, match="ends early"):
        load(model, {"0.v": weights["0.v"], "broken": torch.zeros(0)})
    assert all(tensor.isfinite().all() for tensor in model.tensors().values())
    load(model, weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.tensors().items())
