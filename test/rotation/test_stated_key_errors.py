"""Errors of keys that files state: fitted matrices lose less than others, and servers know what they compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import DumpReader
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.fit.key_errors import KEY, stated_errors, with_key_errors
from oscar_rotation.recipes import FITTED, FitRequest

LONG = [[5], [130, 50], [300]]
CPU = torch.device("cpu")


def test_a_fit_states_them_in_its_file(make_dump: Callable[..., Path], tmp_path: Path) -> None:
    dump = make_dump(tmp_path / "dump", head_dim=64, requests=LONG)
    FITTED["paper"].run(FitRequest(dump, device="cpu")).save(tmp_path, (".safetensors",))
    loaded = read_rotation_file(next(tmp_path.glob("k_*")))
    errors = stated_errors(loaded.metadata.calibration, 64, 2)
    assert errors is not None
    assert all(0.01 < error < 0.5 for error in errors)
    # The random spread of the dump is what its matrices are fitted to; turned by others it costs more.
    turned = replace(loaded, rotations=loaded.rotations.flip(0).roll(1, 1), gains=(0.5, 0.5), duals=None)
    reader = DumpReader(dump)
    worse = with_key_errors(turned, reader, reader.fit_chunks(), 64, CPU).metadata.calibration[KEY]["layers"]
    assert all(other > error for other, error in zip(worse, errors, strict=True))


def test_finer_codes_state_less_and_exact_layers_nothing(make_dump: Callable[..., Path], tmp_path: Path) -> None:
    reader = DumpReader(make_dump(tmp_path, head_dim=64, requests=LONG))
    keys = FITTED["paper"].run(FitRequest(tmp_path, device="cpu")).key
    stated = [
        with_key_errors(replace(keys, bits=bits), reader, [1, 2], 64, CPU).metadata.calibration[KEY]["layers"]
        for bits in ((2, 2), (4, 16))
    ]
    assert stated[1][0] < stated[0][0] / 8
    assert stated[1][1] == 0


def test_short_requests_state_nothing(make_dump: Callable[..., Path], tmp_path: Path) -> None:
    fitted = FITTED["paper"].run(FitRequest(make_dump(tmp_path), device="cpu"))
    assert KEY not in fitted.key.metadata.calibration


@pytest.mark.parametrize(
    "said",
    [
        None,
        [0.1, 0.2],
        {"group_size": 64, "layers": [0.1, 0.2]},
        {"group_size": 32, "layers": [0.1]},
        {"group_size": 32, "layers": [0.1, "x"]},
        {"group_size": 32, "layers": [0.1, float("nan")]},
        {"group_size": 32},
    ],
)
def test_what_is_of_other_rows_is_not_known(said: object) -> None:
    assert stated_errors({KEY: said}, 32, 2) is None
