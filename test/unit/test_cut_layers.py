"""Layers whose kv heads have formats of their own: what a file says, what a rank has of it, and what it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from oscar_kernels.codebook import Codebook
from oscar_kernels.format import (
    AnyFormat,
    CutFormat,
    LayerFormat,
    SideFormat,
    code_widths,
    fingerprint,
    mean_bits,
    parts_of,
)
from oscar_kernels.layout import RowLayout
from oscar_rotation.cli import app
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_tools.doctor import account
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.disaggregation import handshake
from sglang_oscar.features.tiers import salt
from sglang_oscar.features.tiers.host_pool import Int2HostPool
from sglang_oscar.features.tiers.pages import PageLayout, number_columns
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.memory import configurator, sizing
from sglang_oscar.settings import Settings

D, HEADS, LAYERS = 64, 4, 3
LAYOUT = RowLayout(HEADS, D, 64)


def keys() -> RotationSet:
    """A layer of codebooks and three bits, one of codebooks alone, and one with three parts."""
    points = torch.randn(HEADS, D // 4, 256, 4, generator=torch.Generator().manual_seed(1))
    book, used = Codebook.from_points(points), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    centers = torch.randn(LAYERS, HEADS, D, generator=torch.Generator().manual_seed(2))
    return RotationSet(
        torch.eye(D).repeat(LAYERS, HEADS, 1, 1), None, ((1.0, 0.96, 0.96, 0.96), 1.0, 0.96),
        RotationMetadata(side="k", recipe="focus"), torch.eye(D).repeat(LAYERS, HEADS, 1, 1),
        centers, (0.95, 0.95, 0.98), ((2, 3, 3, 3), 2, (4, 2, 2, 3)), None,
        (("codebook", "affine", "affine", "affine"), "codebook", "affine"),
        Codebooks.of_layers([book] * LAYERS).only(used),
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    save_rotation_file(tmp_path / "k.safetensors", keys())
    matrices = torch.eye(D).repeat(LAYERS, 1, 1)
    save_rotation_file(
        tmp_path / "v.safetensors", RotationSet(matrices, metadata=RotationMetadata(side="v", recipe="focus"))
    )
    return {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(tmp_path / f"{side}.safetensors") for side in "kv"}


def load(files: dict[str, str]) -> dict[int, AnyFormat]:
    return dict(load_formats(Settings.from_env(files), LAYOUT, range(LAYERS)))


def test_files_come_back(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases must not read them, so they have a version of their own; inspect shows every head."""
    path = files["SGLANG_OSCAR_K_ROTATION_PATH"]
    found, wanted = read_rotation_file(path), keys()
    for name in ("bits", "codings", "clip_ratios", "gains"):
        assert getattr(found, name) == getattr(wanted, name)
    assert [[run.heads for run in found.runs(layer)] for layer in range(LAYERS)] == [
        [slice(0, 1), slice(1, 4)], [slice(None)], [slice(0, 1), slice(1, 3), slice(3, 4)],
    ]  # fmt: skip
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format_version"] == "4"
    rows = json.loads(CliRunner().invoke(app, ["inspect", path, "--json"]).output)["layers"]
    assert [row["bits"] for row in rows] == [[2, 3, 3, 3], 2, [4, 2, 2, 3]]
    assert "codebook affine affine affine" in CliRunner().invoke(app, ["inspect", path], env={"COLUMNS": "250"}).output
    monkeypatch.setattr("oscar_rotation.files.safetensors_format.FORMAT_VERSIONS", ("1", "2", "3", "no"))
    with pytest.raises(RotationFileError, match="format_version is '4', this release reads"):
        read_rotation_file(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": RotationMetadata(side="v", recipe="focus"), "centers": None}, "codes of values by kv head"),
        ({"layer_ids": (0, 2, 4)}, "of some of a model's layers only"),
        ({"bits": ((2, 3, 3), 2, 2)}, "codes of 3 kv heads that are not those of the layers"),
        ({"bits": ((2, 3, 3, 16), 2, 2)}, "bits by kv head that are none of 2, 3, 4"),
        ({"bits": ((2, 5, 3, 3), 2, 2)}, "codes of 5 bits"),
        ({"gains": ((0.9, 0.9, 0.9, 2.0), 1.0, 1.0)}, "gain 2.0 is outside"),
        ({"clip_ratios": (1.0, (0.9, 0.9, 0.9, 0.0), 1.0)}, "clip ratio 0.0 is outside"),
        ({"codings": (("codebook",) * 4, "codebook", "affine")}, "does not go with 3 bits"),
        ({"codings": (("affine",) * 4, "codebook", "affine")}, "must be positive, finite, and 0"),
    ],
)
def test_files_that_make_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    from oscar_rotation.files import rotation_set

    with pytest.raises(RotationFileError, match=message):
        rotation_set.check_rotation_set(replace(keys(), **change), "k.safetensors")


def test_formats_are_those_of_the_file(files: dict[str, str]) -> None:
    formats = load(files)
    assert [[part.kv_heads for part in of.parts] for of in formats.values()] == [[1, 3], [4], [1, 2, 1]]
    assert [[part.key.bits for part in of.parts] for of in formats.values()] == [[2, 3], [2], [4, 2, 3]]
    first, wanted = formats[0].parts[1], keys()
    assert wanted.centers is not None
    assert torch.equal(first.key.transform.center, wanted.centers[0, 1:])  # type: ignore[arg-type]
    assert (first.key.transform.clip, formats[0].parts[0].key.transform.clip) == (0.96, 1.0)
    assert formats[0].parts[0].key.codebook is not None
    assert formats[0].parts[0].key.codebook.kv_heads == 1
    assert code_widths(formats.values()) == "keys 2 to 4 (affine, codebook), values 2"
    keys_of = [(2 + 0.25) + 3 * (3 + 0.5), 4 * (2 + 0.25), (4 + 0.5) + 2 * (2 + 0.5) + (3 + 0.5)]
    assert mean_bits(formats.values()) == pytest.approx((sum(keys_of) / 12 + 2.5) / 2)
    other = load_formats(Settings.from_env(files), replace(LAYOUT, group_size=32), range(LAYERS))
    assert fingerprint(formats) != fingerprint(other)
    with pytest.raises(Int2Error, match="4 kv heads, the model has 2"):
        load_formats(Settings.from_env(files), RowLayout(2, D, 64), range(LAYERS))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 6), st.data())
def test_ranks_have_all_of_it(heads: list[int], ranks: int, data: st.DataObject) -> None:
    """Parts of ranks are those of the whole, cut once more; where a rank has heads of one part it has a whole layer."""
    bits = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=len(heads), max_size=len(heads)))
    parts = [LayerFormat(n, D, SideFormat(64, bits=b), SideFormat(64)) for n, b in zip(heads, bits, strict=True)]
    whole = CutFormat(tuple(parts))
    edges = [whole.kv_heads * rank // ranks for rank in range(ranks + 1)]
    found = [whole.of_heads(slice(a, b)) for a, b in pairwise(edges) if a < b]
    assert sum(of.cell_bytes for of in found) == whole.cell_bytes
    each = [part.key.bits for part in parts_of(found) for _ in range(part.kv_heads)]
    assert each == [b for n, b in zip(heads, bits, strict=True) for _ in range(n)]
    assert all((len(of.parts) == 1) == isinstance(of, LayerFormat) for of in found)


def test_pages_have_a_place_for_every_part(files: dict[str, str]) -> None:
    formats = load(files)
    page = PageLayout.of_formats(formats, 16)
    assert page.layers == 6
    assert page.item_bytes == 16 * sum(of.cell_bytes for of in formats.values())
    assert number_columns(page, formats.values())


def test_a_format_is_cut_or_not() -> None:
    part = LayerFormat(1, D, SideFormat(64), SideFormat(64))
    for parts in ((part,), (part, LayerFormat(1, 128, SideFormat(64), SideFormat(64)))):
        with pytest.raises(ValueError, match="two or more parts with heads of one size"):
            CutFormat(parts)


def test_ranks_agree_on_tokens(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with smaller rows takes no more tokens than the others, and asks where layers are cut alone."""
    plan = SimpleNamespace(fixed_bytes=0, token_bytes=100)
    monkeypatch.setattr(sizing, "plan_for", lambda *_: plan)
    monkeypatch.setattr(sizing, "keep_plan", lambda *_: None)
    monkeypatch.setattr(sizing, "plan_of", lambda *_: plan)
    monkeypatch.setattr(sizing, "features", list)
    monkeypatch.setattr(sizing, "smallest", lambda number: number - 64)
    monkeypatch.setattr(configurator, "of_this_process", lambda: None)
    of: Any = SimpleNamespace(server_args=None, model_config=None)
    for formats, tokens in ((load(files), 960), ({1: load(files)[1]}, 1024)):
        monkeypatch.setattr(configurator, "model_formats", lambda *_, formats=formats: formats)
        assert sizing.PlanConfigurator(of).calculate_pool_sizes(102_400, 16).max_total_num_tokens == tokens


def test_stages_do_not_send_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(pp_size=2, attn_tp_size=1))
    geometry = SimpleNamespace(windows=None, formats={0: SimpleNamespace(parts=(1, 2))})
    cache = SimpleNamespace(plan=SimpleNamespace(geometry=geometry))
    monkeypatch.setattr(handshake, "cache_of", lambda _: cache)
    with pytest.raises(Int2Error, match="with --pp-size cannot send layers whose kv heads have codes of their own"):
        handshake.around_setup_state(lambda *_: None, None, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_have_host_memory_for_as_many_tokens(
    ranks: int, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size in bytes would not be as many tokens on each; refused before anything is allocated."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=ranks))
    monkeypatch.setattr(salt, "formats_of_this_process", lambda: {1: load(files)[1]})
    assert not salt.ranks_have_other_parts()
    monkeypatch.setattr(salt, "formats_of_this_process", lambda: load(files))
    assert salt.ranks_have_other_parts() == (ranks > 1)
    if ranks > 1:
        with pytest.raises(Int2Error, match=r"--hicache-size holds .*set --hicache-ratio instead"):
            Int2HostPool(None, 2.0, 10, 64, "page_first")


def test_the_account_is_that_of_the_largest_rank(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``oscar doctor`` promises no tokens that another rank has no room for."""
    monkeypatch.setattr(account, "cached_layer_ids", lambda _: range(LAYERS))
    model = SimpleNamespace(get_num_kv_heads=lambda ranks: HEADS // ranks)
    loaded: dict[str, Any] = {
        "settings": Settings.from_env(files),
        "model": model,
        "layouts": (LAYOUT, LAYOUT),
        "ranks": 2,
    }
    formats = loaded["formats"] = load(files)
    sizes = [sum(of.of_heads(own).cell_bytes for of in formats.values()) for own in (slice(0, 2), slice(2, 4))]
    assert sizes[0] != sizes[1]
    assert account.estimated_geometry(loaded).cell_bytes == max(sizes)
