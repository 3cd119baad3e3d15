"""Codes of kv heads: what their books share, what they cost, and which kv head is given which."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy import scope  # noqa: E402
from accuracy.book_refinement import refined  # noqa: E402
from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.codebooks import read_rows  # noqa: E402
from accuracy.codes import Code, books_of, scalar  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.combined import Combined, allocated  # noqa: E402
from oscar_rotation.fit.held_out import Request  # noqa: E402
from oscar_rotation.math.attention_weights import attention_kl  # noqa: E402
from oscar_rotation.math.group_books import GroupBooks, fitted_books  # noqa: E402

HEADS, D, LAYERS = 2, 16, 2


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = normal(HEADS, 200, D, seed=layer + 2) * torch.linspace(0.5, 2, D) + 0.5
    return y, torch.ones(HEADS, 200)


@pytest.mark.parametrize(
    ("book", "heads", "groups", "layers"),
    [
        ("group", HEADS, 4, LAYERS), ("head", HEADS, 1, LAYERS), ("place", 1, 4, LAYERS), ("layer", 1, 1, LAYERS),
        ("model", 1, 1, 1), ("normal", 1, 1, 1),
    ],
)  # fmt: skip
def test_books_are_shared_as_they_say(book: str, heads: int, groups: int, layers: int) -> None:
    found = [x for x in books_of(Code(8, book=book), LAYERS, rows) if x is not None]
    assert {x.points.shape for x in found} == {(HEADS, 4, 8, 4)}
    distinct = {tuple(x.flatten().tolist()) for books in found for x in books.points.flatten(0, 1)}
    assert len(distinct) == heads * groups * layers


def test_an_offset_is_worth_what_rows_have_in_common() -> None:
    """Rows with a mean of their own are read with it."""
    y, weights = rows(0)
    y = y + 4 * normal(HEADS, 200, 1, seed=9)
    errors = []
    for offset in (False, True):
        code = Code(16, book="head", offset=offset)
        read = code.reader(books_of(code, 1, lambda _: (y, weights))[0], keys=False)(y[None])[0]
        errors.append(float((read - y).square().sum()))
        if offset:
            torch.testing.assert_close(read.mean(-1), y.mean(-1), rtol=2**-6, atol=2**-6)
    assert errors[1] < 0.7 * errors[0]


def test_bits_of_a_code() -> None:
    codes = (Code(256), Code(64), Code(16, 2), Code(4096, book="head", offset=True), scalar(3))
    assert [code.bits(128) for code in codes] == [2.125, 1.625, 2.125, 3.25, 3.25]
    known = all_methods()
    for name, bits in {
        "focus, keys in fours, values of 4 levels": 2.159,
        "focus, keys in fours, of 12 bits in 25% of kv heads": 2.284,
        "focus, keys and values in fours of 64 points": 1.661,
    }.items():
        assert known[name].bits_per_element(128) == pytest.approx(bits, abs=1e-3)
        assert name in scope.SETS["combinations"]


def test_bits_go_where_they_save_most() -> None:
    """As many as the mean allows; zero points are counted."""
    losses = torch.tensor([[4.0, 1.0], [9.0, 1.0], [3.0, 2.9], [5.0, 1.0]])
    fours = (Code(256), Code(4096))
    assert allocated(losses, fours, 2.5, D).tolist() == [0, 1, 0, 1]
    assert allocated(losses, (Code(256), scalar(3)), 2.5, D).tolist() == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="in the order of their bits"):
        allocated(losses, fours[::-1], 2.5, D)


def test_points_are_moved_where_attention_loses_less() -> None:
    """On requests that they were not moved on, head by head; a head that loses more keeps its points."""
    requests = [
        Request(3 * normal(HEADS, 80, 2, D, seed=n) * torch.logspace(-1, 1, D), normal(HEADS, 80, D, seed=n + 50), None)
        for n in range(6)
    ]
    y = torch.cat([r.k for r in requests], 1)
    books = fitted_books(y, torch.ones(y.shape[:2]), 4, 4, 5)

    def loss(found: GroupBooks) -> torch.Tensor:
        read = read_rows(requests[5].k[None], found, 1.0)[0]
        return attention_kl(requests[5].q, requests[5].k, read, D**-0.5)

    moved = refined(books, requests[:5], requests[5:], lambda x: x, lambda x: x, 1.0)
    assert bool((loss(moved) <= loss(books)).all())
    assert float(loss(moved).sum()) < float(loss(books).sum())


def test_kv_heads_of_one_layer_have_codes_of_their_own() -> None:
    """Rows of a head are those that its code alone gives; stored bits are the mean over heads."""
    tokens = 400
    scales = torch.logspace(-1, 1, D)
    q, k, v = (normal(tokens, heads, D, seed=heads + 5) * scales + 0.5 for heads in (4, HEADS, HEADS))
    k = k * torch.tensor([0.1, 3.0])[:, None]  # Attention to the second head is sharp.

    def rotary(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(n)[:, None] * 100 ** (-torch.arange(0, D, 2) / D)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    known = Calibration([LayerActivations(q, k, v)], [tokens // 4] * 4, [torch.eye(D).expand(HEADS, -1, -1)], rotary)
    codes = (Code(4), Code(64))
    mixed = Combined("mixed", key_codes=codes, key_mean=1.0, value_codes=(Code(16, book="normal"),))
    alone = [Combined("alone", key_codes=(code,), value_codes=(Code(16, book="normal"),)) for code in codes]
    for method in (mixed, *alone):
        method.fit(known)
    assert mixed.chosen[0].tolist() == [[0, 1]]
    assert mixed.stored_bits(D) == (2.0, 2.0)
    assert mixed.facts["keys"] == {"4 points for 4 channels, group": 1, "64 points for 4 channels, group": 1}
    x = normal(1, HEADS, 30, D, seed=3)
    for head in range(HEADS):
        torch.testing.assert_close(mixed.keys(0, x)[:, head], alone[head].keys(0, x)[:, head])
    assert torch.equal(mixed.values(0, x), alone[0].values(0, x))
