"""Files of keys with codebooks and values without zero points: what comes back, which are refused, who cannot read
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oscar_kernels.codebook import Codebook
from oscar_rotation.cli import app
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

D, HEADS = 32, 2
Change = Callable[[dict[str, torch.Tensor], dict[str, str]], None]


def book(seed: int) -> Codebook:
    points = torch.randn(HEADS, D // 4, 256, 4, generator=torch.Generator().manual_seed(seed))
    return Codebook.from_points(points)


def mixed() -> RotationSet:
    """Keys of four layers: a codebook, affine codes of three bits, symmetric ones of two, a codebook."""
    return RotationSet(
        torch.eye(D).repeat(4, 1, 1), bits=(2, 3, 2, 2), codings=("codebook", "affine", "symmetric", "codebook"),
        codebooks=Codebooks.of_layers([book(0), None, None, book(1)]),
        metadata=RotationMetadata(side="k", recipe="focus"),
    )  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = mixed()
    target, copy = tmp_path / "k.safetensors", tmp_path / "copy.safetensors"
    save_rotation_file(target, kept)
    done = CliRunner().invoke(app, ["convert", str(target), str(copy)])
    assert done.exit_code == 0, done.output
    for path in (target, copy):
        found = read_rotation_file(path)
        assert (found.bits, found.codings) == (kept.bits, kept.codings)
        assert found.codebooks is not None
        assert kept.codebooks is not None
        assert torch.equal(found.codebooks.points, kept.codebooks.points)
        assert torch.equal(found.codebooks.factors, kept.codebooks.factors)
        assert not found.codebooks.points[1:3].any()
        assert not found.codebooks.factors[1:3].any()
    rows = json.loads(CliRunner().invoke(app, ["inspect", str(target), "--json"]).output)["layers"]
    assert [row["coding"] for row in rows] == list(kept.codings or ())
    shown = CliRunner().invoke(app, ["inspect", str(target)], env={"COLUMNS": "200"}).output
    assert "codebook" in shown
    assert "symmetric" in shown


@pytest.mark.parametrize("bits", [None, (3, 3)])
def test_who_reads_affine_codes_alone_refuses_others(
    bits: tuple[int, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the version, which older releases check; affine files keep theirs."""
    path = tmp_path / "v.safetensors"
    affine = RotationSet(torch.eye(D).repeat(2, 1, 1), bits=bits, metadata=RotationMetadata(side="v", recipe="focus"))
    save_rotation_file(path, affine)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format_version"] == ("1" if bits is None else "2")
    save_rotation_file(path, replace(affine, codings=("symmetric", "symmetric")))
    assert read_rotation_file(path).bits == bits
    assert read_rotation_file(path).codebooks is None
    monkeypatch.setattr("oscar_rotation.files.safetensors_format.FORMAT_VERSIONS", ("1", "2", "no"))
    with pytest.raises(RotationFileError, match=r"format_version is '3', this release reads .*; update sglang-oscar"):
        read_rotation_file(path)


def test_pt_files_hold_affine_codes(tmp_path: Path) -> None:
    symmetric = RotationSet(torch.eye(D).repeat(2, 1, 1), codings=("symmetric",) * 2)
    with pytest.raises(RotationFileError, match=r"\.pt file holds rotations for codes of 2 bits.*as \.safetensors"):
        save_rotation_file(tmp_path / "v.pt", symmetric)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def stated(name: str, text: str) -> Change:
    def apply(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> None:
        header[name] = text

    return apply


def without(*names: str) -> Change:
    def apply(tensors: dict[str, torch.Tensor], header: dict[str, str]) -> None:
        for name in names:
            (tensors if name in tensors else header).pop(name)  # type: ignore[attr-defined]

    return apply


POINTS, FACTORS = "codebook_points", "codebook_factors"
HOSTILE = [
    (stated("codings", '["codebook"]'), "codings of 1 layers for 4 layers"),
    (stated("codings", '["magic", "affine", "symmetric", "codebook"]'), "coding 'magic', this release knows affine"),
    (stated("codings", '["codebook", "codebook", "symmetric", "codebook"]'), "of layer 1 does not go with 3 bits"),
    (stated("bits", "[2, 3, 16, 2]"), "coding symmetric of layer 2 does not go with 16 bits"),
    (stated("codings", '["affine", "affine", "symmetric", "affine"]'), "holds codebooks that no layer"),
    (stated("codings", '["codebook", "affine", "affine", "affine"]'), "0 in layers without a codebook"),
    (stated("codings", "[1, 2, 3, 4]"), "expected a list of strings"),
    (stated("codings", json.dumps(["affine"] * 2000)), "2000 strings, at most 1024 layers"),
    (without("codings"), "header cannot be read"),
    (stated("side", "v"), "codebooks of values, only keys have them"),
    (stated("format_version", "2"), "holds tensors"),
    (without(POINTS), "holds tensors"),
    (without(POINTS, FACTORS), "has the coding codebook, but no codebooks"),
    (tensor(POINTS, lambda x: x.float()), "points are torch.float32"),
    (tensor(POINTS, lambda x: x[..., :2]), r"points are torch.int8 \[4, 2, 8, 256, 2\], expected torch.int8"),
    (tensor(POINTS, lambda x: x[:2]), r"expected torch.int8 \[4, kv_heads, 8, 256, 4\]"),
    (tensor(POINTS, lambda x: x.flatten(3)), "points are torch.int8"),
    (tensor(POINTS, lambda x: x.index_fill(0, torch.tensor([0]), -128)), "from -127 to 127"),
    (tensor(FACTORS, lambda x: x[:, :1]), "factors are torch.float32"),
    (tensor(FACTORS, lambda x: x.double()), "factors are torch.float64"),
    (tensor(FACTORS, lambda x: x * float("nan")), "factors must be positive, finite"),
    (tensor(FACTORS, lambda x: -x), "factors must be positive, finite"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message[:30] for _, message in HOSTILE])
def test_hostile_codings_are_refused_in_a_line(change: Change, message: str, tmp_path: Path) -> None:
    path = tmp_path / "k.safetensors"
    save_rotation_file(path, mixed())
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors, header)
    save_file(tensors, path, metadata=header)
    with pytest.raises(RotationFileError, match=message) as refused:
        read_rotation_file(path)
    assert "\n" not in str(refused.value)


def test_codebooks_of_other_heads_than_the_centers() -> None:
    odd = replace(mixed(), centers=torch.zeros(4, HEADS + 1, D))
    with pytest.raises(RotationFileError, match="codebooks of 2 kv heads, but centers of 3"):
        save_rotation_file("k.safetensors", odd)
