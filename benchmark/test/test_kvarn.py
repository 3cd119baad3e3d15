"""KVarN: variances that are equal along both axes, and what that does to tokens and channels of very different size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.attention import prefill_then_decode  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.kvarn import SINK_TOKENS, TILE, Kvarn, coded, normalized  # noqa: E402
from accuracy.quantizers import uniform  # noqa: E402
from oscar_rotation.math.hadamard import sylvester_hadamard  # noqa: E402

D = 64


def tile(seed: int = 1, decades: float = 1.5) -> torch.Tensor:
    """Tokens and channels whose sizes span ``decades`` each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.logspace(0, decades, n)[torch.randperm(n, generator=generator)] for n in (TILE, D)]
    return 10 * torch.randn(TILE, D, generator=generator) * sizes[0][:, None] * sizes[1]


@pytest.mark.parametrize("order", [(-1, -2), (-2, -1)])
@pytest.mark.parametrize(("decades", "spread", "left"), [(0.1, 1.2, 1.02), (1.5, 20, 2)])
def test_normalization_equalizes_both_axes(order: tuple[int, int], decades: float, spread: float, left: float) -> None:
    """Exactly where sizes are not too different; else the bound of the scales leaves a factor below 2."""
    x = tile(decades=decades)
    tokens, channels = normalized(x, order)
    assert (tokens.shape, channels.shape) == ((TILE, 1), (1, D))
    flat = x / tokens / channels
    for dim in (0, 1):
        before, after = x.std(dim), flat.std(dim)
        assert float(before.max() / before.min()) > spread
        assert float(after.max() / after.min()) < left


def test_a_small_tile_stays_as_it_is() -> None:
    """Deviations below the scales' lower bound."""
    small = 1e-2 * tile()
    for scales in normalized(small / small.abs().max() * 1e-2, (-1, -2)):
        assert float(scales.max() / scales.min()) == 1


@pytest.mark.parametrize("dim", [-2, -1])
def test_sizes_of_tokens_and_channels_cost_nothing(dim: int) -> None:
    """Multiplied by their sizes, tokens and channels are read back with the same relative error; plain rounding along
    the same axis loses much more."""
    x = tile()
    whitened = torch.randn(TILE, D, generator=torch.Generator().manual_seed(3))

    def error(back: torch.Tensor, of: torch.Tensor) -> float:
        sizes = of.std(-1, keepdim=True) * of.std(-2, keepdim=True)
        return float(((back - of) / sizes).square().mean() / (of / sizes).square().mean())

    even = error(coded(whitened, 2, dim), whitened)
    assert error(coded(x, 2, dim), x) == pytest.approx(even, rel=0.15)
    assert error(uniform(x, 2, dim, x.shape[dim]), x) > 3 * even


def test_representable_tiles_come_back() -> None:
    """Codes 0 to 15 in every channel and no deviation to normalize: exact but for float16 scales."""
    codes = torch.stack([torch.randperm(TILE, generator=torch.Generator().manual_seed(n)) % 16 for n in range(D)], 1)
    x = codes.float() / 16
    torch.testing.assert_close(coded(x, 4, -2), x, atol=2e-3, rtol=0)


def test_tiles_wait_until_they_are_full() -> None:
    """The sink and the last broken tile are as they were; queries read a tile's codes once it is whole."""
    method = Kvarn(4, 2)
    method.rotation = sylvester_hadamard(D).float()
    x = torch.randn(1, 2, SINK_TOKENS + TILE + 50, D, generator=torch.Generator().manual_seed(4))
    for back in (method.keys(0, x), method.values(0, x)):
        outside = torch.ones(x.shape[2], dtype=torch.bool)
        outside[SINK_TOKENS : SINK_TOKENS + TILE] = False
        torch.testing.assert_close(back[:, :, outside], x[:, :, outside], atol=1e-5, rtol=1e-5)
        assert float((back - x)[:, :, ~outside].abs().max()) > 0.05
    keys, values = method.exact_from(prefill_then_decode(600, 300))
    assert torch.equal(keys, values)
    assert keys[382:385].tolist() == [256, 384, 384]


def test_bits_are_those_of_the_authors_tiles() -> None:
    """Per tile of a head: packed codes and 2-byte scales, (2 d + 128) of keys and (d + 256) of values."""
    for head_dim in (64, 128, 256):
        for bits, name in (((4, 2), "KVarN K4V2"), ((2, 2), "KVarN K2V2")):
            keys, values = all_methods()[name].stored_bits(head_dim)
            elements = TILE * head_dim
            assert keys == bits[0] + 16 * (2 * head_dim + TILE) / elements
            assert values == bits[1] + 16 * (head_dim + 2 * TILE) / elements
