"""The transform of the recipe plus: what its derivation says, and the fit, files and command around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpError, DumpManifest, DumpReader
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.load import load_rotation
from oscar_rotation.math.balanced import balance, gain, shrunk
from oscar_rotation.recipes.plus import CLIP_RATIO, KEY_GAIN, VALUE_GAIN, Moments, fit_plus

K_NAME, V_NAME = "k_rotation_balanced_u_h_br.safetensors", "v_rotation_balanced_u_h_br.safetensors"
runner = CliRunner()


def moment(seed: int, d: int = 32) -> torch.Tensor:
    """A second moment with a spread of eigenvalues: float64 [d, d]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * d, d, generator=generator, dtype=torch.float64)
    mixed = x * torch.logspace(-1, 1, d, dtype=torch.float64) @ torch.linalg.qr(x[:d])[0]
    return mixed.mT @ mixed / len(x)


def loss(transform: torch.Tensor, stored: torch.Tensor, reading: torch.Tensor) -> float:
    """tr(T^-1 C_Q T^-T) tr(T^T C_K T)."""
    inverse = torch.linalg.inv(transform)
    return float((inverse @ reading @ inverse.mT).trace() * (transform.mT @ stored @ transform).trace())


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_derivation(seed: int) -> None:
    """Both sides get one spectrum, evenly spread; the loss is (sum sigma)^2 and no other transform is below it."""
    stored, reading = moment(seed), moment(seed + 1)
    found = balance(stored, reading)
    t, d = found.transform, len(stored)
    torch.testing.assert_close(t @ found.dual.mT, torch.eye(d, dtype=t.dtype), atol=1e-8, rtol=0)
    keys, queries = t.mT @ stored @ t, found.dual.mT @ reading @ found.dual
    torch.testing.assert_close(keys / keys.trace(), queries / queries.trace(), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(keys.diagonal(), keys.diagonal().mean().expand(d), atol=0, rtol=1e-6)
    torch.testing.assert_close(keys.trace(), stored.trace(), atol=0, rtol=1e-6)
    best = loss(t, stored, reading)
    assert best == pytest.approx(float(found.sigma.sum()) ** 2, rel=1e-6)
    assert best == pytest.approx(gain(stored, reading) * float(stored.trace() * reading.trace()), rel=1e-6)
    assert best <= float(stored.trace() * reading.trace()) * (1 + 1e-9)
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 1e-1, 1.0):
        other = t @ (torch.eye(d, dtype=t.dtype) + size * torch.randn(d, d, generator=generator).double() / d)
        assert loss(other, stored, reading) >= best * (1 - 1e-9)


@given(st.integers(0, 10_000), st.floats(1.0, 64.0))
@settings(max_examples=20)
def test_outliers_of_coordinates_vanish(seed: int, factor: float) -> None:
    """Keys times A and queries times A^-T: what is stored has the same distribution up to a common scale."""
    stored, reading = moment(seed), moment(seed + 1)
    a = torch.eye(len(stored), dtype=torch.float64)
    a[3, 3] = a[7, 7] = factor
    inverse = torch.linalg.inv(a)
    plain, moved = balance(stored, reading), balance(a.mT @ stored @ a, inverse @ reading @ inverse.mT)
    torch.testing.assert_close(moved.sigma, plain.sigma, rtol=1e-5, atol=0)
    both = [a @ moved.transform, plain.transform]
    grams = [x @ x.mT / (x @ x.mT).trace() for x in both]
    torch.testing.assert_close(grams[0], grams[1], rtol=1e-4, atol=1e-8)


def test_largest_directions_are_constant_in_a_group() -> None:
    """A key along the i-th common eigendirection, i < d/G, shifts whole groups of G channels."""
    stored, reading = moment(1), moment(2)
    found, d = balance(stored, reading), 32
    keys = found.transform.mT @ stored @ found.transform
    values, vectors = torch.linalg.eigh(keys)
    assert values.flip(0)[0] > 1.5 * values.flip(0)[4]
    for groups in (1, 2, 4):
        for i in range(groups):
            pattern = vectors[:, d - 1 - i].view(groups, -1)
            torch.testing.assert_close(pattern, pattern[:, :1].expand_as(pattern), atol=1e-6, rtol=0)


def test_geometric_mean() -> None:
    """M = T T^T solves M C_K M ~ C_Q; of diagonal moments it is the root of the ratio, by hand."""
    stored, reading = moment(3), moment(4)
    m = balance(stored, reading).transform
    m = m @ m.mT
    both = m @ stored @ m
    torch.testing.assert_close(both / both.trace(), reading / reading.trace(), rtol=1e-6, atol=1e-9)
    found = balance(*(torch.diag(torch.tensor(x, dtype=torch.float64)) for x in ([1.0, 4.0], [9.0, 16.0])))
    torch.testing.assert_close(found.sigma, torch.tensor([8.0, 3.0], dtype=torch.float64))
    m = found.transform @ found.transform.mT
    torch.testing.assert_close(m, m[1, 1] * torch.diag(torch.tensor([1.5, 1.0], dtype=torch.float64)))


@given(st.integers(0, 10_000), st.floats(1.0, 64.0), st.floats(0.0, 1.0))
@settings(max_examples=20)
def test_shrinkage_leaves_outlier_channels_harmless(seed: int, factor: float, share: float) -> None:
    """Balancing shrunk moments is still indifferent to the scale of a channel, and shrinks correlations alone."""
    stored, reading = moment(seed), moment(seed + 1)
    scales = torch.ones(len(stored), dtype=torch.float64)
    scales[3] = scales[7] = factor
    moved = [x * scales**sign * scales[:, None] ** sign for x, sign in ((stored, 1), (reading, -1))]
    plain, other = (balance(shrunk(k, share), shrunk(q, share)) for k, q in ((stored, reading), moved))
    torch.testing.assert_close(other.sigma, plain.sigma, rtol=1e-5, atol=0)
    half = shrunk(stored, share)
    torch.testing.assert_close(half.diagonal(), stored.diagonal())
    off = ~torch.eye(len(stored), dtype=torch.bool)
    torch.testing.assert_close(half[off], (1 - share) * stored[off])


def test_balance_refuses_what_it_cannot_invert() -> None:
    with pytest.raises(ValueError, match="zero"):
        balance(torch.zeros(4, 4), torch.eye(4))
    with pytest.raises(ValueError, match="one shape"):
        balance(torch.eye(4), torch.eye(8))
    with pytest.raises(ValueError, match="power of two"):
        balance(torch.eye(6), torch.eye(6))


def test_moments_leave_the_sink_out_of_what_is_stored() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(300, heads, 8, generator=generator) for heads in (4, 2, 2))
    k[:64] += 100
    k[200:250] -= 100
    moments = Moments(2, 8, 8)
    moments.update(q, k, v, (200, 100))
    kept = torch.cat([k[64:200], k[250:]]).double()
    torch.testing.assert_close(moments.center(), kept.mean(0), rtol=1e-6, atol=1e-6)
    rest = kept - kept.mean(0)
    expected = torch.einsum("thd,the->de", rest, rest) / (2 * len(kept))
    torch.testing.assert_close(moments.keys_by_head().mean(0), expected, rtol=1e-4, atol=1e-4)
    assert moments.queries.rows == 600


def test_fit_files_and_command(tmp_path: Path, make_dump: Callable[..., Path], model: Path) -> None:
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    asked = ["--recipe", "plus", "--bits", "k2v2", "--model", str(model)]
    done = runner.invoke(app, ["fit", str(dump), "--out", str(out), *asked])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == [K_NAME, V_NAME]
    key = load_rotation(out / K_NAME, num_layers=2, head_dim=32, side="k")
    value = load_rotation(out / V_NAME, num_layers=2, head_dim=32, side="v")
    assert key.recipe == value.recipe == key.metadata.recipe == "plus"
    assert key.centers is not None
    assert key.centers.shape == (2, 2, 32)
    assert value.centers is None
    assert key.gains == (KEY_GAIN,) * 2
    assert value.gains == (VALUE_GAIN,) * 2
    for side in (key, value):
        assert side.clip_ratios == (CLIP_RATIO,) * 2
        assert side.duals is not None
        product = side.rotations.double() @ side.duals.double().mT
        torch.testing.assert_close(product, torch.eye(32).double().expand(2, -1, -1), atol=1e-4, rtol=0)
        gram = side.rotations.mT @ side.rotations
        assert (gram - torch.eye(32)).abs().max() > 0.01
    shown = runner.invoke(app, ["inspect", str(out / K_NAME)])
    assert "plus" in shown.output
    assert "one per kv head" in shown.output
    refused = runner.invoke(app, ["convert", str(out / K_NAME), str(out / "k.pt")])
    assert refused.exit_code == 1
    assert "recipe plus" in refused.output
    again = fit_plus(DumpReader(dump), OutputWeights(model), device="cpu")
    torch.testing.assert_close(again.key.rotations, key.rotations, rtol=0, atol=0)


def test_a_layer_that_saw_nothing_is_named(tmp_path: Path, make_dump: Callable[..., Path], model: Path) -> None:
    dump = make_dump(tmp_path / "dump")
    for path in dump.glob("layer_1/[qkv]/*.pt"):
        torch.save(torch.load(path, weights_only=True) * 0, path)
    for recipe in ("plus", "focus"):
        arguments = ["fit", str(dump), "--out", str(tmp_path / "out"), "--model", str(model), "--recipe", recipe]
        done = runner.invoke(app, arguments)
        assert done.exit_code == 1
        assert done.stderr.startswith("error: layer 1 of the dump: a second moment is zero")


def test_layers_that_draft_are_no_layers_of_the_model(tmp_path: Path) -> None:
    own, draft = torch.eye(64), torch.zeros(64, 64)
    names = {"model.layers.0.self_attn.o_proj.weight": own, "mtp.layers.0.self_attn.o_proj.weight": draft}
    save_file(names, str(tmp_path / "model.safetensors"))
    assert torch.equal(OutputWeights(tmp_path).reader(0, 2, 32), torch.eye(32).expand(2, -1, -1))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(DumpError, match="not a readable index of weights"):
        OutputWeights(tmp_path)


@pytest.mark.parametrize("named", ["weights", "model_id", "relative"])
def test_the_dump_names_the_model(
    tmp_path: Path, make_dump: Callable[..., Path], model: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the weights in full, or, in older dumps, the model as the server was given it."""
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    facts = {"num_layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "model_id": "served/as"}
    facts |= {
        "weights": {"weights": str(model)},
        "model_id": {"model_id": str(model)},
        "relative": {"weights": "model"},
    }[named]
    DumpManifest(**facts).write(dump)
    done = runner.invoke(app, ["fit", str(dump), "--out", str(out), "--recipe", "plus"])
    assert done.exit_code == 0, done.output
    loaded = read_rotation_file(out / K_NAME)
    assert loaded.metadata.model_id == facts["model_id"]
    assert str(model) not in str(loaded.metadata) or named == "model_id"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ([], 1, "does not name its model, whose weights the recipe focus reads; name its"),
        (["--model", "MODEL/nowhere"], 1, "or fit with --recipe paper"),
        (
            ["--model", "MODEL", "--order", "descending"],
            2,
            "has no meaning for --recipe focus; --recipe paper takes it",
        ),
        (["--model", "MODEL", "--format", "pt"], 2, "is written as .safetensors only"),
        (
            ["--recipe", "paper", "--model", "MODEL"],
            2,
            "for --recipe paper; --recipe plus or focus takes it",
        ),
        (["--recipe", "better"], 2, "plus, focus, paper"),
    ],
)
def test_command_refusals(
    args: list[str], status: int, message: str, tmp_path: Path, make_dump: Callable[..., Path], model: Path
) -> None:
    dump = make_dump(tmp_path / "dump")
    given = [arg.replace("MODEL", str(model)) for arg in args]
    done = runner.invoke(app, ["fit", str(dump), "--out", str(tmp_path / "out"), *given])
    assert done.exit_code == status
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_do(tmp_path: Path, model: Path) -> None:
    weights = OutputWeights(model)
    assert weights.reader(1, 2, 32).shape == (2, 32, 32)
    with pytest.raises(DumpError, match="layer 2"):
        weights.reader(2, 2, 32)
    with pytest.raises(DumpError, match="does not fit"):
        weights.reader(0, 3, 32)
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    tensor = torch.zeros(48, 128).to(torch.float8_e4m3fn)
    save_file({"model.layers.0.self_attn.o_proj.weight": tensor}, str(quantized / "model.safetensors"))
    with pytest.raises(DumpError, match=r"which is quantized; .* fit with --recipe paper"):
        OutputWeights(quantized).reader(0, 2, 32)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DumpError, match="o_proj"):
        OutputWeights(empty)


@pytest.mark.parametrize(("end", "blocks"), [("_scale_inv", (2, 2)), ("_scale", (1, 1)), ("_scale", (192, 1))])
def test_fp8_weights_are_read_with_their_scales(end: str, blocks: tuple[int, int], tmp_path: Path) -> None:
    """A scale per block of 128 x 128, the last of them cut, one of all, and one of each row."""
    name, generator = "model.layers.0.self_attn.o_proj.weight", torch.Generator().manual_seed(3)
    scale = torch.rand(blocks, generator=generator) + 0.1
    codes = torch.randn(192, 256, generator=generator).to(torch.float8_e4m3fn)
    rows = torch.arange(192) // (128 if blocks[0] == 2 else 192 // blocks[0])
    columns = torch.arange(256) // (256 // blocks[1])
    restored = codes.float() * scale[rows][:, columns]
    stored = scale.reshape(1) if blocks == (1, 1) else scale
    for folder, tensors in (("fp8", {name: codes, name + end: stored}), ("plain", {name: restored})):
        (tmp_path / folder).mkdir()
        save_file(tensors, str(tmp_path / folder / "model.safetensors"))
    found, expected = (OutputWeights(tmp_path / folder).reader(0, 2, 64) for folder in ("fp8", "plain"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duals": torch.eye(64).expand(3, -1, -1) * 2}, "inverse"),
        ({"duals": torch.eye(64)}, "duals are"),
        ({"duals": torch.full((3, 64, 64), float("nan"))}, "duals are"),
        ({"centers": torch.zeros(2, 1, 64)}, "centers are"),
        ({"centers": torch.zeros(3, 1, 64).double()}, "centers are"),
        ({"centers": torch.full((3, 1, 64), float("inf"))}, "NaN or infinite"),
        ({"gains": (1.0, 1.0)}, "2 gains for 3 layers"),
        ({"gains": (1.0, 0.1, 1.0)}, "gain 0.1 is outside"),
        ({"gains": (1.0, float("nan"), 1.0)}, "gain nan is outside"),
    ],
)
def test_broken_transforms_are_refused(
    change: dict[str, Any], message: str, rotation_set: RotationSet, tmp_path: Path
) -> None:
    broken = RotationSet(rotation_set.rotations, metadata=rotation_set.metadata, **change)
    with pytest.raises(RotationFileError, match=message):
        save_rotation_file(tmp_path / "k.safetensors", broken)


def test_centers_alone_are_a_file_too(rotation_set: RotationSet, tmp_path: Path) -> None:
    """Rotations with centers, for instance of the zero-point-aware order, round-trip as recipe plus."""
    centers = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(5))
    save_rotation_file(
        tmp_path / "k.safetensors",
        RotationSet(rotation_set.rotations, metadata=rotation_set.metadata, centers=centers),
    )
    loaded = read_rotation_file(tmp_path / "k.safetensors")
    assert loaded.recipe == "plus"
    assert loaded.duals is None
    assert loaded.centers is not None
    assert torch.equal(loaded.centers, centers)


def test_what_a_file_says_it_is_counts(rotation_set: RotationSet, tmp_path: Path) -> None:
    """Not what it looks like; a name that this release does not know, or that cannot be true, is refused."""
    path = tmp_path / "k.safetensors"
    for stated, looks in (("plus", "plus"), ("", "paper")):
        save_rotation_file(path, replace(rotation_set, metadata=RotationMetadata(recipe=stated)))
        assert load_rotation(path, num_layers=3, head_dim=64, side="k").recipe == looks
    save_rotation_file(path, replace(rotation_set, metadata=RotationMetadata(recipe="later")))
    assert read_rotation_file(path).recipe == "later"
    with pytest.raises(RotationFileError, match="recipe later, this release knows plus, focus, paper; update"):
        load_rotation(path, num_layers=3, head_dim=64, side="k")
    with pytest.raises(RotationFileError, match="states the recipe paper, but holds more than rotations"):
        save_rotation_file(path, replace(rotation_set, gains=(1.0,) * 3, metadata=RotationMetadata(recipe="paper")))
    with pytest.raises(RotationFileError, match=r"a \.pt file holds rotations"):
        save_rotation_file(tmp_path / "k.pt", replace(rotation_set, gains=(1.0,) * 3))
