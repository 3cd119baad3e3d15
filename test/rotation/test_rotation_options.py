"""Every method, composition and way of sharing gives a rotation that is what its name says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_rotation.dump import DumpReader
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import check_rotation_set
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.targets import METHODS
from oscar_rotation.load import load_rotation
from oscar_rotation.math.compose import COMPOSITIONS
from oscar_rotation.math.covariance import QueryCovariance
from oscar_rotation.math.eigenbasis import eigenbasis
from oscar_rotation.math.hadamard import bit_reversal, block_hadamard, pbr_permutation, sylvester_hadamard
from oscar_rotation.math.quantized import quantized
from oscar_rotation.math.residual import ResidualCovariance
from oscar_rotation.recipes.paper import fit

MakeDump = Callable[..., Path]
seeds = st.integers(0, 2**31 - 1)


def some_basis(d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4 * d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    eigenvalues, vectors = eigenbasis(x.T @ x)
    return vectors, eigenvalues


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("d", [32, 128, 256])
def test_compositions_are_orthogonal_and_differ(name: str, d: int) -> None:
    vectors, eigenvalues = some_basis(d)
    rotation = COMPOSITIONS[name](vectors, eigenvalues)
    assert torch.allclose(rotation.T @ rotation, torch.eye(d, dtype=torch.float64), atol=1e-10)
    others = (make(vectors, eigenvalues) for other, make in COMPOSITIONS.items() if other != name)
    assert all((rotation - other).abs().max() > 1e-3 for other in others)


def test_compositions_are_the_products_their_names_list() -> None:
    u, eigenvalues = some_basis(256)
    h, p = sylvester_hadamard(256), pbr_permutation(eigenvalues)
    expected = {
        "plain": u,
        "pbr": u @ p,
        "br": u[:, bit_reversal(256)],
        "br_h128": u[:, bit_reversal(256)] @ torch.block_diag(sylvester_hadamard(128), sylvester_hadamard(128)),
        "r_h": u @ h,
        "h_pbr": h @ p,
        "h_r_pbr": h @ u @ p,
        "h_pbr_r": h @ p @ u,
        "r_h_pbr": u @ h @ p,
    }
    assert set(expected) == set(COMPOSITIONS)
    for name, rotation in expected.items():
        assert torch.allclose(COMPOSITIONS[name](u, eigenvalues), rotation, atol=1e-12), name


def test_blocks_must_divide() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        block_hadamard(96, 64)


@settings(max_examples=40)
@given(st.integers(1, 6), seeds)
def test_theorem_1_no_rotation_beats_the_eigenbasis_for_a_frozen_diagonal_residual(exponent: int, seed: int) -> None:
    d = 2**exponent
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * d, d, generator=generator, dtype=torch.float64)
    covariance = x.T @ x
    residual = torch.rand(d, generator=generator, dtype=torch.float64).sort().values.diag()
    _, u = eigenbasis(covariance, "descending")
    other, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    best, loss = (torch.trace(r.T @ covariance @ r @ residual) for r in (u, other))
    assert best <= loss * (1 + 1e-12)


def test_residual_covariance_is_that_of_a_hadamard_cache() -> None:
    k = torch.randn(50, 2, 32, generator=torch.Generator().manual_seed(3))
    target = ResidualCovariance("k", 2, 32)
    target.update(k[:30], k[:30], k[:30], [30])
    target.update(k[30:], k[30:], k[30:], [20])
    h = sylvester_hadamard(32)
    for head in range(2):
        rotated = k[:, head] @ h.float()
        lost = (quantized(rotated, 1.0, 32) - rotated).double() @ h.T
        assert torch.allclose(target.per_head()[head], lost.T @ lost / 50, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_methods_fit_the_sides_they_name(tmp_path: Path, make_dump: MakeDump, method: str) -> None:
    result = fit(make_dump(tmp_path), FitOptions.of_method(method), device="cpu")
    hadamard = sylvester_hadamard(32).float()
    for rotations, target in zip((result.key, result.value), METHODS[method], strict=True):
        check_rotation_set(rotations, method)
        assert rotations.metadata.objective == target
        is_hadamard = torch.equal(rotations.rotations, hadamard.expand(2, -1, -1))
        assert is_hadamard == (target == "hadamard")
        assert (rotations.metadata.composition == "h") == (target == "hadamard")


def test_one_rotation_per_kv_head(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path / "dump")
    result = fit(root, FitOptions(share="kv_head", report=True), device="cpu")
    reader = DumpReader(root)
    target = QueryCovariance(2, 32)
    for chunk in (reader.load(1, index) for index in (1, 2, 3)):
        target.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
    for head in range(2):
        rotation = result.key.rotations[1, head].double()
        importance = (rotation.T @ target.per_head()[head] @ rotation).diagonal()
        assert torch.allclose(importance, importance.mean().expand(32), rtol=1e-5)
    assert result.report["layers"][1]["k"]["chosen"]["importance"] == pytest.approx(1, abs=1e-4)
    path = tmp_path / "k.safetensors"
    save_rotation_file(path, result.key)
    back = read_rotation_file(path)
    assert back.rotations.shape == (2, 2, 32, 32)
    assert torch.equal(back.rotations, result.key.rotations)
    assert load_rotation(path, num_layers=2, head_dim=32, side="k").per_head
    save_rotation_file(tmp_path / "k.pt", result.key)
    assert torch.equal(read_rotation_file(tmp_path / "k.pt").rotations, result.key.rotations)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("composition", "h_h", "composition must be one of r_h_pbr"),
        ("share", "model", "share must be one of layer, kv_head"),
        ("group_size", 48, "group_size must be a power of two"),
        ("holdout_tokens", 0, "holdout_tokens must be at least 1"),
    ],
)
def test_bad_options_are_refused(field: str, value: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        FitOptions(**{field: value})  # type: ignore[arg-type]
