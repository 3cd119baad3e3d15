"""Codebooks of pairs: how near they are to the bound, and what rows made of them keep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.codebooks import gaussian_book, nearest, product_book, refined  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import Transforms  # noqa: E402
from accuracy.methods.pair_codebook import FocusPairs, PairCodebook, read_back  # noqa: E402
from accuracy.quantizers import lloyd_max, lloyd_max_round  # noqa: E402


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def levels_book() -> torch.Tensor:
    return product_book(tuple(lloyd_max(2)[0].tolist())).float()


def distortion(x: torch.Tensor, book: torch.Tensor) -> float:
    return float((x - book[nearest(x, book)]).square().mean())


def test_sixteen_points_beat_four_levels_of_a_normal_variable() -> None:
    """.1175 for levels (Max 1960), .1075 for points; no code of two bits has less than 4^-2 = .0625 (Shannon)."""
    x = normal(200_000, 2)
    assert distortion(x, levels_book()) == pytest.approx(0.1175, rel=0.01)
    assert distortion(x, gaussian_book().float()) == pytest.approx(0.1075, rel=0.01)


def test_gaussian_book_is_where_lloyd_stops() -> None:
    """A further round on other samples hardly moves it, and it has as many points as four bits name."""
    book = gaussian_book().float()
    assert book.shape == (16, 2)
    moved = refined(book, normal(200_000, 2), torch.ones(200_000), 1)
    assert float((moved - book).norm(dim=1).max()) < 0.05


def test_product_of_levels_is_the_scalar_quantizer() -> None:
    x, book = normal(1000, 2), levels_book()
    assert torch.equal(book[nearest(x, book)], lloyd_max_round(x, 2))


def test_points_that_nothing_is_near_to_stay() -> None:
    book = torch.tensor([[0.0, 0.0], [50.0, 50.0]])
    assert torch.equal(refined(book, normal(100, 2), torch.ones(100), 3)[1], book[1])


@pytest.mark.parametrize("book", [gaussian_book().float(), levels_book()])
@pytest.mark.parametrize("gain", [1.0, 0.98])
def test_rows_keep_mean_and_length_along_what_was_stored(book: torch.Tensor, gain: float) -> None:
    y = normal(200, 128) * 3 + 5
    back = read_back(y, book, 64, gain)
    groups, read = y.unflatten(-1, (-1, 64)), back.unflatten(-1, (-1, 64))
    torch.testing.assert_close(read.mean(-1), groups.mean(-1), rtol=1e-2, atol=1e-2)
    centered = groups - groups.mean(-1, keepdim=True)
    along = ((read - read.mean(-1, keepdim=True)) * centered).sum(-1) / centered.square().sum(-1)
    torch.testing.assert_close(along, torch.full_like(along, gain), rtol=2**-7, atol=0)


def test_constant_and_representable_groups_come_back() -> None:
    torch.testing.assert_close(read_back(torch.full((3, 64), 4.0), levels_book(), 64, 1.0), torch.full((3, 64), 4.0))
    # All levels, equally often: the deviation of the group is that of the levels.
    levels = lloyd_max(2)[0].float()
    y = levels.repeat(16)[None] / levels.square().mean().sqrt()
    torch.testing.assert_close(read_back(y, levels_book(), 64, 1.0), y, rtol=2**-7, atol=2**-7)


def test_rows_have_the_bytes_of_plus() -> None:
    methods = all_methods()
    for group in (64, 128):
        for d in (64, 128, 256):
            assert methods[f"plus g{group}, 16 points per pair"].stored_bits(d) == methods[
                f"plus g{group}"
            ].stored_bits(d)


def test_codebook_of_calibration_fits_what_is_not_normal() -> None:
    """Pairs that lie on 16 spots: a fitted codebook finds them, the one for normal pairs does not."""
    generator = torch.Generator().manual_seed(5)
    spots = torch.cartesian_prod(*[torch.tensor([-1.4, -0.2, 0.2, 1.4])] * 2)
    pairs = spots[torch.randint(16, (500, 32), generator=generator)] + 0.01 * torch.randn(
        500, 32, 2, generator=generator
    )
    y = pairs.flatten(1)
    method = PairCodebook(points="calibration")
    fitted = method._fitted(y, levels_book())
    errors = [float((read_back(y, book, 64, 1.0) - y).square().mean()) for book in (fitted, gaussian_book().float())]
    assert errors[0] < 0.2 * errors[1]


def test_transforms_by_head_take_pairs_of_every_head() -> None:
    """What is fitted by kv head is stored in pairs as well, each head in its own basis."""
    forward = torch.linalg.qr(normal(1, 2, 64, 64))[0]
    method = FocusPairs(points="levels")
    method.key = method.value = Transforms(forward, forward.mT.contiguous())
    method.books = [(levels_book(), levels_book())]
    x = normal(1, 2, 300, 64)
    for read, gain in ((method.keys(0, x), method.k_gain), (method.values(0, x), method.v_gain)):
        for head in range(2):
            alone = read_back(x[0, head] @ forward[0, head], levels_book(), 64, gain) @ forward[0, head].T
            torch.testing.assert_close(read[0, head], alone, rtol=1e-4, atol=1e-4)
