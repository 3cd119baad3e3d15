"""Fours of key channels: what books are fitted to, what rows made of them keep, and NOVA-KV's transform."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy_figures import chart_names  # noqa: E402

from accuracy import scope  # noqa: E402
from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.codebooks import gaussian_fours, in_float8, nearest, read_rows  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.nova import eigenbasis_of  # noqa: E402
from accuracy.methods.vector_keys import weighted_keys  # noqa: E402
from oscar_rotation.math import group_books  # noqa: E402
from oscar_rotation.math.group_books import GroupBooks, fitted_books  # noqa: E402

HEADS, D = 2, 16


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def books(points: int = 8) -> GroupBooks:
    return GroupBooks(normal(HEADS, D // 4, points, 4))


def test_every_head_and_group_has_its_own_book(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the nearest point of each book alone, however many rows are looked at together."""
    found, x = books(), normal(HEADS, 50, D, seed=2)
    read = found.nearest(x)
    for head in range(HEADS):
        for group in range(D // 4):
            book, span = found.points[head, group], slice(4 * group, 4 * group + 4)
            assert torch.equal(read[head, :, span], book[nearest(x[head, :, span], book)])
    monkeypatch.setattr(group_books, "BLOCK_ROWS", 7)
    monkeypatch.setattr(group_books, "BLOCK_SCORES", {"cpu": 7 * 8 * 5})
    assert torch.equal(found.nearest(x), read)
    weights = torch.rand(HEADS, 50, generator=torch.Generator().manual_seed(3))
    moved = found.refined(x, weights)
    monkeypatch.undo()
    torch.testing.assert_close(moved.points, found.refined(x, weights).points)


def test_fitting_finds_spots_and_weights_decide_between_them() -> None:
    """Rows on as many spots as a book has points are read back; with fewer points heavy rows are read best."""
    spots = normal(6, D) * 3
    x = spots[torch.randint(6, (HEADS, 300), generator=torch.Generator().manual_seed(4))] + 0.01 * normal(HEADS, 300, D)
    even = torch.ones(HEADS, 300)
    assert float((fitted_books(x, even, 4, 64, 10).nearest(x) - x).square().mean()) < 1e-3
    heavy = torch.where((x - spots[0]).norm(dim=-1) < 1, 1e4, 1.0)
    errors = [
        (fitted_books(x, weights, 4, 2, 10).nearest(x) - x).square().mean(-1)[heavy > 1].mean()
        for weights in (heavy, even)
    ]
    assert errors[0] < 0.1 * errors[1]


def test_a_point_that_nothing_is_near_to_stays() -> None:
    points = torch.zeros(1, 1, 2, 4)
    points[0, 0, 1] = 50
    x = normal(1, 30, 4)
    moved = GroupBooks(points).refined(x, torch.ones(1, 30)).points[0, 0]
    torch.testing.assert_close(moved[0], x[0].mean(0))
    assert torch.equal(moved[1], points[0, 0, 1])


@pytest.mark.parametrize(("dtype", "error"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)])
def test_float8_points_use_the_whole_range(dtype: torch.dtype, error: float) -> None:
    """The largest of a book is exact, all others to half a step of the format, whatever the book's scale."""
    found = GroupBooks(books(64).points * torch.tensor([1e-4, 1e4])[:, None, None, None])
    rounded = in_float8(found, dtype)
    large = found.points.abs() > 0.01 * found.points.abs().amax((-2, -1), keepdim=True)
    assert float(((rounded.points - found.points) / found.points).abs()[large].max()) <= error
    torch.testing.assert_close(rounded.points.abs().amax((-2, -1)), found.points.abs().amax((-2, -1)))


def test_gaussian_fours_are_better_than_four_levels() -> None:
    """.1175 of the variance is what four levels leave (Max 1960)."""
    book, x = gaussian_fours(256), normal(20_000, 4, seed=9)
    assert book.shape == (256, 4)
    assert float((book[nearest(x, book)] - x).square().mean()) < 0.108


@pytest.mark.parametrize("gain", [0.0, 0.98])
def test_rows_scale_with_what_was_stored(gain: float) -> None:
    """Rows that are longer are read longer; with a gain, along themselves by just that much."""
    y, found = normal(3, HEADS, 40, D), GroupBooks(gaussian_fours(256).expand(HEADS, D // 4, -1, -1))
    read = read_rows(y, found, gain)
    assert torch.equal(read_rows(y * 64, found, gain), read * 64)
    if gain:
        along = (read * y).sum(-1) / y.square().sum(-1)
        torch.testing.assert_close(along, torch.full_like(along, gain), rtol=2**-7, atol=0)
    else:
        assert float((read - y).square().mean() / y.square().mean()) < 0.13


def calibration(context: int = 0, tokens: int = 400) -> Calibration:
    scales = torch.logspace(-1, 1, D)
    q, k, v = (normal(tokens, heads, D, seed=heads + 5) * scales + 0.5 for heads in (4, HEADS, HEADS))

    def rotary(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(n)[:, None] * 100 ** (-torch.arange(0, D, 2) / D)
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    readers = torch.eye(D).expand(HEADS, -1, -1)
    return Calibration([LayerActivations(q, k, v)], [tokens // 2] * 2, [readers], rotary, context)


def test_keys_are_turned_and_weighed() -> None:
    """Turning keeps every pair's length; sinks weigh nothing, and without attention all others alike."""
    known = calibration(context=5000)
    keys, weights = weighted_keys(known, 0, 0.0, known.positions(None))
    plain, _ = weighted_keys(known, 0, 0.0, None)
    assert torch.equal(plain, known.layers[0].k.transpose(0, 1))
    pairs, before = (x.unflatten(-1, (2, -1)).square().sum(-2) for x in (keys, plain))
    torch.testing.assert_close(pairs, before, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(keys, plain, atol=0.1)
    assert not bool(weights.unflatten(1, (2, -1))[:, :, :25].any())
    assert torch.equal(weights.unflatten(1, (2, -1))[:, :, 25:], torch.ones(HEADS, 2, 175))
    half = weighted_keys(known, 0, 0.5, None)[1]
    assert float(half.std()) > 0.1
    assert half.mean() == pytest.approx(float(weights.mean()), rel=0.2)


def test_novas_errors_are_those_of_the_logits() -> None:
    """Behind the transform keys are uncorrelated, errors are those that queries see, groups span the spectrum."""
    stored, reading = (x.double() @ x.double().T + torch.eye(D) for x in (normal(D, 3 * D), normal(D, D, seed=8)))
    forward, back = eigenbasis_of(stored, reading)
    torch.testing.assert_close(forward @ back, torch.eye(D).double(), atol=1e-8, rtol=0)
    torch.testing.assert_close(back.mT @ back, torch.linalg.inv(forward @ forward.mT), atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(forward @ forward.mT, reading, atol=1e-8, rtol=1e-8)
    spectrum = forward.mT @ stored @ forward
    values = spectrum.diagonal()
    torch.testing.assert_close(spectrum, torch.diag(values), atol=1e-6 * float(values.max()), rtol=0)
    ranks = values.argsort(descending=True).argsort().view(-1, 4)
    assert torch.equal(ranks, torch.arange(D).view(4, -1).T)


def test_bits() -> None:
    """Those of the paper at 128K tokens, windows included; a zero point less for values is a sixteenth of a bit."""
    methods = all_methods()
    assert methods["NOVA-KV"].bits_per_element(128) == pytest.approx(2.22, abs=0.005)
    with_values, normal_values = (
        methods[f"{scope.FOCUS}, keys as fitted fours{more}"].bits_per_element(128)
        for more in ("", ", values as normal fours")
    )
    assert with_values == pytest.approx(methods["NOVA-KV"].bits_per_element(128))
    assert normal_values == pytest.approx(with_values - 1 / 16, abs=1e-3)


def test_named_sets_are_of_methods_that_exist() -> None:
    """The chart has every width of keys with every width of values, one row each, for both recipes."""
    known = all_methods()
    for names in (*scope.SETS.values(), scope.FAR):
        assert set(names) <= set(known)
    assert scope.asked(known["NOVA-KV"], 16384)
    assert not scope.asked(known["naive INT2 g128"], 16384)
    assert scope.asked(known["naive INT2 g128"], 4096)
    assert not scope.asked(known["plus g128, --bits k4v2"], 4096)
    assert len(set(scope.SETS["chart"])) == 2 * 16 - 1
    method = known[chart_names(scope.PLUS)[16, 2]]
    method.fit(calibration())
    k = normal(1, HEADS, 30, D)
    assert torch.equal(method.keys(0, k), k)
    assert not torch.equal(method.values(0, k), k)
    assert method.stored_bits(D) == (16.0, 4.0)
