"""Every method runs on every head_dim that is served, and on any number of heads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.attention import prefill_then_decode  # noqa: E402
from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import Method  # noqa: E402
from oscar_rotation.threads import one_thread  # noqa: E402

TOKENS = 272
"""More than a sink, a window and a block of tokens together."""
SMALLEST = (64, 3, 9)
"""head_dim, kv heads, query heads; 3 x 64 channels is what groups of 128 do not divide."""
OTHERS = [(64, 1, 1), (128, 1, 7), (128, 4, 4), (256, 2, 4), (256, 1, 16)]


def rotary(head_dim: int):
    def tables(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(n)[:, None] * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    return tables


def calibration(head_dim: int, kv_heads: int, q_heads: int) -> Calibration:
    """One layer, and twice as many tokens as channels: second moments of one kv head are not singular."""
    lengths = [3 * head_dim // 4, 5 * head_dim // 4]
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    scales = torch.logspace(-0.5, 0.5, head_dim)

    def activations(heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, head_dim, generator=generator) * scales + 0.2

    layer = LayerActivations(activations(q_heads), activations(kv_heads), activations(kv_heads))
    readers = torch.randn(kv_heads, head_dim, 2 * head_dim, generator=generator)
    torch.manual_seed(head_dim)
    size = {"hidden_size": 4 * q_heads, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model, ids = LlamaForCausalLM(LlamaConfig(**size, **heads)).eval(), torch.randint(64, (2, 512), generator=generator)
    return Calibration([layer], lengths, [readers @ readers.mT], rotary(head_dim), model=model, ids=ids)


def one_of_each_kind() -> dict[str, Method]:
    """The first method of every class and group size: its variants differ in what they fit, not in shapes."""
    kinds: dict[tuple[type, object], Method] = {}
    for method in all_methods().values():
        group = getattr(method, "group", None) or getattr(getattr(method, "options", None), "group", None)
        kinds.setdefault((type(method), group), method)
    return {method.name: method for method in kinds.values()}


def check(methods: dict[str, Method], head_dim: int, kv_heads: int, q_heads: int) -> None:
    """What is read back has the shape of what was stored and resembles it; bits and windows are stated."""
    known = calibration(head_dim, kv_heads, q_heads)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, kv_heads, TOKENS, head_dim, generator=generator) * torch.logspace(-0.5, 0.5, head_dim) + 0.2
    schedule = prefill_then_decode(TOKENS, 200)
    for name, method in methods.items():
        assert method.source, name
        with one_thread():  # as in the laboratory: many small factorizations
            method.fit(known)
        for side, coded in (("keys", method.keys(0, x)), ("values", method.values(0, x))):
            assert coded.shape == x.shape, (name, side)
            assert coded.dtype == torch.float32, (name, side)
            assert bool(coded.isfinite().all()), (name, side)
            assert float((coded - x).square().sum() / x.square().sum()) < 2, (name, side)
        assert 1 <= method.bits_per_element(head_dim) <= 16, name
        view = method.view(schedule)
        for exact_from in (view.key_exact_from, view.value_exact_from):
            assert exact_from is None or exact_from.shape == (TOKENS,), name


def test_every_method() -> None:
    check(all_methods(), *SMALLEST)


@pytest.mark.parametrize(("head_dim", "kv_heads", "q_heads"), OTHERS)
def test_every_kind_of_method_on_every_geometry(head_dim: int, kv_heads: int, q_heads: int) -> None:
    check(one_of_each_kind(), head_dim, kv_heads, q_heads)
