"""What heads of a layer would lose by sharing a matrix, from a file alone, against the moments of its fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.math.balanced import COMPOSITION, balance
from oscar_rotation.recipes import plus
from oscar_rotation.report.sharing import overlap, sharing_loss, unrelated_overlap

runner = CliRunner()
D, HEADS = 32, 3


def moments(heads: int, seed: int = 1) -> torch.Tensor:
    """Second moments with uneven spectra in bases of their own, all of one trace: float64 [heads, d, d]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, D, 4 * D, generator=generator, dtype=torch.float64)
    x = x * torch.logspace(-1, 1, D, dtype=torch.float64)[torch.randperm(D, generator=generator)][None, :, None]
    basis = torch.linalg.qr(torch.randn(heads, D, D, generator=generator, dtype=torch.float64))[0]
    found = basis @ x @ x.mT @ basis.mT
    return found / found.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def fitted(stored: torch.Tensor, reading: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Transforms and sigma of every head, as a file has them: float32."""
    found = [balance(a, b) for a, b in zip(stored, reading, strict=True)]
    return torch.stack([x.transform for x in found]).float(), torch.stack([x.sigma for x in found]).float()


def error(transform: torch.Tensor, dual: torch.Tensor, stored: torch.Tensor, reading: torch.Tensor) -> float:
    return float((transform.mT @ stored @ transform).trace() * (dual.mT @ reading @ dual).trace())


def test_loss_is_that_of_the_moments() -> None:
    """The file knows neither moments nor sizes; where keys are equally large, it gives their true ratio."""
    stored, reading = moments(HEADS), moments(HEADS, seed=2) * torch.tensor([1.0, 30.0, 0.2])[:, None, None]
    transforms, sigma = fitted(stored, reading)
    shared = balance(stored.mean(0), reading.mean(0))
    own = [balance(a, b) for a, b in zip(stored, reading, strict=True)]
    pairs = list(zip(stored, reading, strict=True))
    lost = sum(error(shared.transform, shared.dual, *pair) for pair in pairs)
    kept = sum(error(x.transform, x.dual, *pair) for x, pair in zip(own, pairs, strict=True))
    assert lost > 1.2 * kept
    assert sharing_loss(transforms, sigma) == pytest.approx(lost / kept - 1, rel=1e-3)


def test_heads_that_are_alike_lose_nothing() -> None:
    """Also where one has larger keys and smaller queries: that is a matter of coordinates."""
    stored, reading = moments(1), moments(1, seed=2)
    size = torch.tensor([1.0, 100.0, 0.01], dtype=torch.float64)[:, None, None]
    transforms, sigma = fitted(stored * size, reading / size)
    assert sharing_loss(transforms, sigma) == pytest.approx(0, abs=1e-4)
    assert sharing_loss(transforms[:1], sigma[:1]) == pytest.approx(0, abs=1e-4)
    assert sharing_loss(*fitted(moments(HEADS), reading.expand(HEADS, -1, -1))) > 0.05


def test_overlap() -> None:
    generator = torch.Generator().manual_seed(3)
    rotations = torch.linalg.qr(torch.randn(4, 128, 128, generator=generator, dtype=torch.float64))[0]
    assert overlap(rotations) == pytest.approx(unrelated_overlap(128), abs=0.01)
    assert overlap(rotations[:1].expand(4, -1, -1)) == pytest.approx(1)
    assert overlap(rotations[:1]) == 1


def test_recipes_say_that_they_balance() -> None:
    assert plus.COMPOSITION == COMPOSITION


def inspected(path: Path) -> tuple[dict, str]:
    """The JSON and the table."""
    found = [runner.invoke(app, ["inspect", str(path), *more]) for more in (["--json"], [])]
    assert all(result.exit_code == 0 for result in found), found[0].output + found[1].output
    return json.loads(found[0].output), " ".join(found[1].output.split())


def test_inspect_of_transforms(tmp_path: Path) -> None:
    transforms, sigma = fitted(moments(HEADS), moments(HEADS, seed=2))
    duals = torch.linalg.inv(transforms.double()).mT.float()
    path = tmp_path / "k.safetensors"
    metadata = RotationMetadata(side="k", composition=COMPOSITION, recipe="focus")
    save_rotation_file(path, RotationSet(transforms[None], sigma[None], None, metadata, duals[None]))
    content, table = inspected(path)
    loss = content["layers"][0]["sharing_loss"]
    assert loss == pytest.approx(sharing_loss(transforms, sigma))
    assert content["layers"][0]["overlap"] is None
    assert content["sharing"].startswith(f"one transform per layer would raise the expected error by {loss:.1%}")
    assert f"+{loss:.1%}" in table


@pytest.mark.parametrize("changes", [{"metadata": RotationMetadata(side="k")}, {"eigenvalues": None}])
def test_transforms_of_unknown_making_say_nothing(tmp_path: Path, changes: dict) -> None:
    transforms, sigma = fitted(moments(HEADS), moments(HEADS, seed=2))
    duals = torch.linalg.inv(transforms.double()).mT.float()
    metadata = RotationMetadata(side="k", composition=COMPOSITION)
    parts = {"rotations": transforms[None], "eigenvalues": sigma[None], "duals": duals[None], "metadata": metadata}
    save_rotation_file(tmp_path / "k.safetensors", RotationSet(**parts | changes))
    content, _ = inspected(tmp_path / "k.safetensors")
    assert content["layers"][0]["sharing_loss"] is None
    assert content["sharing"] == ""


def test_inspect_of_rotations(tmp_path: Path, rotation_set: RotationSet) -> None:
    """Per kv head an overlap, per layer nothing."""
    save_rotation_file(tmp_path / "k.pt", rotation_set)
    assert inspected(tmp_path / "k.pt")[0]["sharing"] == ""
    heads = RotationSet(rotation_set.rotations[None], metadata=RotationMetadata(side="k"))
    save_rotation_file(tmp_path / "heads.pt", heads)
    content, table = inspected(tmp_path / "heads.pt")
    assert content["layers"][0]["overlap"] == pytest.approx(overlap(rotation_set.rotations))
    assert "unrelated ones by 0.10" in content["sharing"]
    assert "rotations of two heads overlap by" in table
