"""Fitting again: the recipe of the files that are served, rows as they are, keys as they have become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from oscar_kernels.format import AnyFormat, fingerprint
from oscar_kernels.layout import RowLayout
from oscar_rotation.dump import DumpManifest, DumpReader, DumpWriter
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.key_errors import with_key_errors
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.result import FitResult
from oscar_rotation.recipes import FITTED, FitRequest
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.refitting.fitting import fit_again, fitted_recipe
from sglang_oscar.features.refitting.in_place import pairs
from sglang_oscar.formats.rotations import load
from sglang_oscar.settings import Settings

HEADS, D, LAYERS = 2, 64, 2
CPU = torch.device("cpu")
EVEN = torch.ones(D)
UNEVEN = torch.cat([torch.full((4,), 30.0), torch.ones(D - 4)])
WAYS = {
    "paper": FitOptions(share="kv_head", context=0),
    "plus": FitOptions(bits=BitGoal(3, 2), value_coding="symmetric", context=0),
    "focus": FitOptions(bits=BitGoal(mean=3.4), key_coding="auto", context=0),
}
"""The last cuts layers between kv heads."""


def dump(root: Path, spread: torch.Tensor, seed: int) -> Path:
    """Three prompts of two layers; queries have the inverse spread of keys."""
    random, writer = torch.Generator().manual_seed(seed), DumpWriter(root, total_kv_heads=HEADS)
    for layer in range(LAYERS):
        q, k, v = (torch.randn(600, heads, D, generator=random) for heads in (2 * HEADS, HEADS, HEADS))
        writer.write(layer, 1, q / spread, k * spread, v, [200, 200, 200])
        writer.write_output_reader(layer, torch.eye(D).repeat(2 * HEADS, 1, 1))
    (root / "config.json").write_text("{}")
    sizes = {"num_layers": LAYERS, "q_heads": 2 * HEADS, "kv_heads": HEADS, "head_dim": D}
    DumpManifest.model_validate({**sizes, "weights": str(root), "output_readers": True}).write(root)
    return root


def served(result: FitResult, folder: Path) -> tuple[Settings, Mapping[int, AnyFormat]]:
    """A server's settings and formats, on files of a fit."""
    folder.mkdir()
    result.save(folder, (".safetensors",))
    settings = Settings.from_env({}).with_rotations(*map(str, rotation_files(folder)))
    return settings, load(settings, RowLayout(HEADS, D, D, torch.bfloat16), range(LAYERS)).formats


@pytest.mark.parametrize("recipe", WAYS)
def test_rows_stay_and_matrices_follow(recipe: str, tmp_path: Path) -> None:
    old = dump(tmp_path / "old", EVEN, 1)
    settings, formats = served(FITTED[recipe].run(FitRequest(old, WAYS[recipe], device="cpu")), tmp_path / "files")
    _, same = served(fit_again(old, settings, formats, recipe, CPU), tmp_path / "same")
    assert fingerprint(same) == fingerprint(formats)
    new = dump(tmp_path / "new", UNEVEN, 2)
    result = fit_again(new, settings, formats, recipe, CPU)
    _, again = served(result, tmp_path / "again")
    assert fingerprint(again) != fingerprint(formats)
    assert any(len(layer.parts) > 1 for layer in formats.values()) == (recipe == "focus")
    for layer_id, layer in formats.items():
        assert all(list(pairs(*parts, "")) for parts in zip(layer.parts, again[layer_id].parts, strict=True))
    reader = DumpReader(new)
    stale = with_key_errors(read_rotation_file(str(settings.k_rotation)), reader, [1], D, CPU)
    errors = [keys.metadata.calibration["key_errors"]["layers"] for keys in (stale, result.key)]
    assert all(before > 2 * after for before, after in zip(*errors, strict=True))


def test_built_in_rotations_are_refused() -> None:
    with pytest.raises(Int2Error, match="oscar calibrate"):
        fitted_recipe("hadamard+identity")
