"""The recipe focus: weights against the definition, centers that turn, and what weighing by attention is for."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.focus_fit import FocusFit, best, moment, split
from accuracy.focus_side import FocusOptions, Request
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.layout import RowLayout
from oscar_rotation.math import attention_weights
from oscar_rotation.math.attention_weights import Exact, attention_kl, mixed, output_error, sensitivity
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.rotary_center import RotaryCenter, fit_center, turned

HEADS, GROUP, D = 2, 3, 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables(n: int, d: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(n)[:, None] * 1000 ** (-torch.arange(0, d, 2) / d)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def request(n: int, seed: int) -> Request:
    return Request(
        draw(HEADS, n, GROUP, D, seed=seed),
        draw(HEADS, n, D, seed=seed + 1),
        draw(HEADS, n, D, seed=seed + 2),
        tables(n),
    )


def probabilities(r: Request, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 [heads, n, group, n]."""
    logits = torch.einsum("hngd,hmd->hngm", r.q.double(), keys.double()) * scale
    n = keys.shape[1]
    return logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril()[None, :, None], -math.inf).softmax(-1)


def quantized_pairs(n: int) -> torch.Tensor:
    """bool [n, n]: query i reads key j from its row."""
    exact, positions = Exact.of(n), torch.arange(n)
    return (positions[:, None] - positions >= exact.recent) & (positions >= exact.sink)


@pytest.mark.parametrize("block", [1 << 25, 2000])
def test_sensitivities_are_what_they_say(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition with all of p at once in float64, whatever the block; with and without weights."""
    monkeypatch.setattr(attention_weights, "BLOCK_SCORES", block)
    n, scale = 90, 0.6
    r = request(n, 5)
    reading, stored = draw(HEADS, n, GROUP, seed=8).exp(), draw(HEADS, n, seed=9).exp()
    p = probabilities(r, r.k, scale)
    read = quantized_pairs(n)[None, :, None]
    readers = ((n - Exact.of(n).recent - torch.arange(n)).clamp_min(1) * GROUP).double()
    for a, b in ((None, None), (reading, stored)):
        found = sensitivity(r.q, r.k, scale, a, b)
        u = p * (1 - p) * read / readers
        by_key = (u if a is None else u * a[..., None]).sum((1, 2))
        by_query = (u if b is None else u * b[:, None, None]).sum(-1)
        torch.testing.assert_close(found.keys.double(), by_key, rtol=2e-4, atol=1e-9)
        torch.testing.assert_close(found.queries.double(), by_query, rtol=2e-4, atol=1e-9)
        torch.testing.assert_close(
            found.values.double(), (p.square() * read / readers).sum((1, 2)), rtol=2e-4, atol=1e-9
        )


def test_losses_are_what_they_say() -> None:
    """KL and output error of the last queries, sink and recent keys exact."""
    n, scale, last = 80, 0.5, 12
    r = request(n, 15)
    other = r.k + 0.3 * draw(HEADS, n, D, seed=21)
    read = quantized_pairs(n)[None, :, None]
    logits = [torch.einsum("hngd,hmd->hngm", r.q.double(), k.double()) * scale for k in (r.k, other)]
    future = ~torch.ones(n, n, dtype=torch.bool).tril()[None, :, None]
    exact, seen = logits[0], torch.where(read, logits[1], logits[0])
    p, q = (x.masked_fill(future, -math.inf).log_softmax(-1) for x in (exact, seen))
    kl = (p.exp() * (p - q).nan_to_num(0)).sum(-1)[:, -last:].mean((1, 2))
    torch.testing.assert_close(attention_kl(r.q, r.k, other, scale, last).double(), kl, rtol=1e-3, atol=1e-7)
    wrong = 0.2 * draw(HEADS, n, D, seed=22)
    weight = draw(HEADS, D, 40, seed=23)
    moved = torch.einsum("hngm,hmd->hngd", p.exp() * read, wrong.double()) @ weight[:, None].double()
    energy = moved.square().sum(-1)[:, -last:].mean((1, 2))
    found = output_error(r.q, r.k, wrong, scale, weight @ weight.mT, last)
    torch.testing.assert_close(found.double(), energy, rtol=1e-3, atol=1e-7)


def test_to_second_order_the_kl_is_half_the_weighted_error() -> None:
    """For small independent errors, KL = 1/2 sum u_ij d_ij^2 on average: what the weights are derived from."""
    n, scale = 120, 0.7
    r = request(n, 31)
    generator = torch.Generator().manual_seed(3)
    p = probabilities(r, r.k, scale)
    u = (p * (1 - p) * quantized_pairs(n)[None, :, None])[:, -60:]
    found, expected = 0.0, 0.0
    for _ in range(40):
        error = 0.02 * torch.randn(HEADS, n, D, generator=generator)
        found += float(attention_kl(r.q, r.k, r.k + error, scale, 60).mean())
        moved = torch.einsum("hngd,hmd->hngm", r.q[:, -60:].double(), error.double()) * scale
        expected += float((u * moved.square()).sum(-1).mean() / 2)
    assert found == pytest.approx(expected, rel=0.05)


def test_a_turning_center_is_found() -> None:
    """Keys with a mean before RoPE and a constant one after it lose both, but for pairs that hardly turn; tables that
    are shorter than the head leave the rest of it."""
    mu, m = draw(HEADS, D, seed=41), draw(HEADS, D, seed=42)
    for width in (D, D // 2):
        lengths = [300, 200]
        places = [tables(n, width) for n in lengths]
        keys = [
            turned((mu[:, None] + 0.1 * draw(HEADS, n, D, seed=n)), *t) + m[:, None]
            for n, t in zip(lengths, places, strict=True)
        ]
        weights = [torch.ones(HEADS, n) for n in lengths]
        left = {}
        for turning in (False, True):
            center = fit_center(keys, weights, places, turning)
            rest = [k - center.at(*t) for k, t in zip(keys, places, strict=True)]
            left[turning] = float(torch.cat(rest, 1).square().mean())
        assert left[True] < 0.02
        assert left[False] > 10 * left[True]
    plain = RotaryCenter(m, torch.zeros_like(m))
    assert torch.equal(plain.at(*tables(7)), m[:, None].expand(-1, 7, -1))


def test_rotation_and_its_inverse() -> None:
    x = draw(HEADS, 50, D, seed=51)
    cos, sin = tables(50)
    torch.testing.assert_close(turned(turned(x, cos, sin), cos, -sin), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned(x, cos, sin).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gain", [0.0, 0.98])
def test_four_levels_are_the_servers_rows(gain: float) -> None:
    """Bit by bit; more levels lose less, a sixteenth of the error for two more bits."""
    y = draw(40, HEADS, 64, seed=61)
    layout = RowLayout(HEADS, 64, 32)
    assert torch.equal(coded(y, 32, 0.92, gain), decode_rows(encode_rows(y, layout, 0.92, gain), layout))
    errors = [float((coded(y, 64, 1.0, gain, levels) - y).square().mean()) for levels in (3, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < errors[1] / 12


def test_weights_are_mixed_by_head() -> None:
    weights = [draw(HEADS, n, seed=n).exp() * torch.tensor([[1.0], [1000.0]]) for n in (100, 60)]
    for share in (0.0, 0.5, 1.0):
        found = mixed(weights, share, sink=0)
        assert torch.cat(found, 1).mean(1).tolist() == pytest.approx([1, 1], rel=1e-4)
    assert not bool(mixed(weights, 0.5)[0][:, :12].any())
    x = draw(HEADS, 100, D, seed=3)
    expected = torch.einsum("hnd,hn,hne->hde", x, weights[0], x) / weights[0].sum(1)[:, None, None]
    torch.testing.assert_close(moment([x], weights[:1]).float(), expected, rtol=1e-4, atol=1e-5)


def crowd(n: int, seed: int) -> Request:
    """Most keys are noise in channels that nobody reads; an eighth, small and elsewhere, gets all the attention."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(1, n, 64, generator=generator) * torch.cat([torch.full((32,), 4.0), torch.full((32,), 0.2)])
    few = torch.rand(n, generator=generator) < 1 / 8
    k[:, few] = torch.randn(1, int(few.sum()), 64, generator=generator)
    k[:, few, 0] = 12.0
    q = torch.randn(1, n, 1, 64, generator=generator)
    q[..., 0] = 8.0
    k[:, ~few, 0] = -12.0
    return Request(q, k, torch.randn(1, n, 64, generator=generator), tables(n, 64))


def test_keys_that_are_read_are_coded_well() -> None:
    """Weighing by attention takes most of the loss where those that are read are few and unlike the rest."""
    requests = [crowd(400, seed) for seed in range(4)]
    test, reader, scale = crowd(400, 99), torch.eye(64)[None], 64**-0.5
    losses = {}
    for share in (0.0, 0.9):
        options = FocusOptions(shares=(share,), turning=(False,), clips=(0.88,), gains=(0.98,))
        side = FocusFit(requests, scale, reader, options).keys()
        losses[share] = float(attention_kl(test.q, test.k, side.read(test.k, test.tables, 64, 4), scale))
    assert losses[0.9] < 0.7 * losses[0.0]


def test_a_fit_undoes_itself_and_chooses_on_other_requests() -> None:
    requests = [request(120, 100 + 10 * i) for i in range(4)]
    weight = draw(HEADS, D, 40, seed=7)
    fit = FocusFit(requests, D**-0.5, weight @ weight.mT, FocusOptions(group=16)).layer()
    for side, x in ((fit.key, requests[0].k), (fit.value, requests[0].v)):
        torch.testing.assert_close(side.out(side.into(x, tables(120)), tables(120)), x, rtol=1e-3, atol=1e-3)
        assert len(side.chosen) == HEADS
    alone = FocusFit(requests, D**-0.5, weight @ weight.mT, FocusOptions(group=16, per_head=False)).keys()
    assert torch.equal(alone.transform[0], alone.transform[1])
    sides = [replace(fit.key, loss=torch.tensor(loss), chosen=(name,) * HEADS)
             for name, loss in (("a", [1.0, 4.0]), ("b", [3.0, 3.0]), ("c", [2.0, 9.0]))]  # fmt: skip
    assert best(sides, True).chosen == ("a", "b")
    assert best(sides, True).loss.tolist() == [1.0, 3.0]
    assert best(sides, False).chosen == ("a", "a")
    assert [len(part) for part in split(requests, 0.25)] == [3, 1]
    with pytest.raises(ValueError, match="two calibration requests or more, got 1"):
        split(requests[:1], 0.25)
