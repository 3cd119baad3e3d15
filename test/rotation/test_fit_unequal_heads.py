"""Fits where heads of keys and of values differ in size: a matrix of its size for each, by every recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oscar_rotation.dump import DumpError, DumpManifest, DumpReader
from oscar_rotation.dump.covariances import CovarianceWriter
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions, OptionError
from oscar_rotation.fit.targets import KEY_TARGETS, VALUE_TARGETS
from oscar_rotation.load import load_rotation
from oscar_rotation.math.covariance import ScoreValueCovariance
from oscar_rotation.recipes import FITTED
from oscar_rotation.recipes.base import FitRequest
from oscar_rotation.recipes.paper import fit

MakeDump = Callable[..., Path]
D, V, Q_HEADS, KV_HEADS = 48, 32, 4, 2


@pytest.fixture
def dump(tmp_path: Path, make_dump: MakeDump) -> Path:
    root = make_dump(tmp_path / "dump", head_dim=D, value_head_dim=V)
    facts = {"num_layers": 2, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": D, "value_head_dim": V}
    DumpManifest(**facts).write(root)
    return root


@pytest.fixture
def weights(tmp_path: Path) -> str:
    folder = tmp_path / "weights"
    folder.mkdir()
    generator = torch.Generator().manual_seed(4)
    names = [f"model.layers.{n}.self_attn.o_proj.weight" for n in range(2)]
    made = {name: torch.randn(40, Q_HEADS * V, generator=generator).bfloat16() for name in names}
    save_file(made, str(folder / "model.safetensors"))
    return str(folder)


def inverts(rotations: RotationSet, head_dim: int) -> None:
    assert rotations.rotations.shape[-2:] == (head_dim, head_dim)
    duals = rotations.rotations if rotations.duals is None else rotations.duals
    unit = rotations.rotations.double() @ duals.double().mT
    assert torch.allclose(unit, torch.eye(head_dim, dtype=torch.float64).expand_as(unit), atol=1e-3)


def test_attention_outputs_have_the_scale_of_the_keys(dump: Path) -> None:
    """Whether the factor on the logits is stated or not; against softmax in float64."""
    chunk = DumpReader(dump).load(0, 1)
    wanted = torch.zeros(KV_HEADS, V, V, dtype=torch.float64)
    begin = 0
    for length in chunk.seq_lens:
        q, k, v = (x[begin : begin + length].double() for x in (chunk.q, chunk.k, chunk.v))
        for head in range(Q_HEADS):
            logits = (q[:, head] @ k[:, head // 2].T / D**0.5).masked_fill(
                torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
            )
            out = logits.softmax(-1) @ v[:, head // 2]
            wanted[head // 2] += out.T @ out
        begin += length
    for scale in (None, D**-0.5):
        found = ScoreValueCovariance(KV_HEADS, V, sm_scale=scale)
        found.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
        assert torch.allclose(found.sums, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("key_target", KEY_TARGETS)
@pytest.mark.parametrize("value_target", VALUE_TARGETS)
def test_every_target_has_its_size(key_target: str, value_target: str, dump: Path) -> None:
    options = FitOptions(key_target, value_target, fit_clip=True, report=key_target == "qqt", group_size=16)
    result = fit(dump, options, device="cpu")
    inverts(result.key, D)
    inverts(result.value, V)


def test_covariances_of_a_server_give_the_same(dump: Path, tmp_path: Path) -> None:
    reader, root = DumpReader(dump), tmp_path / "sums"
    root.mkdir()
    writer = CovarianceWriter(root, num_layers=2, kv_shard=0, kv_shards=1, tp_rank=0, tp_size=1, sm_scale=D**-0.5)
    for chunk in reader.chunks:
        for layer in range(2):
            own = reader.load(layer, chunk)
            writer.write(layer, chunk, own.q, own.k, own.v, own.seq_lens)
    writer.finish()
    assert reader.manifest is not None
    reader.manifest.write(root)
    for method in ("qqt_sst", "ktk_vtv", "hadamard"):
        options = FitOptions.of_method(method)
        dumped, streamed = fit(dump, options, device="cpu"), fit(root, options, device="cpu")
        for a, b in ((dumped.key, streamed.key), (dumped.value, streamed.value)):
            assert (a.rotations - b.rotations).abs().max() < 1e-5


@pytest.mark.parametrize("recipe", ["plus", "focus"])
def test_recipes_that_read_weights(recipe: str, dump: Path, weights: str) -> None:
    """Affine codes, and codebooks of keys whose gains are chosen by the error behind the output projection."""
    for coding in ("affine", "codebook"):
        options = FitOptions(context=0, key_coding=coding, bits=BitGoal(2, 3), group_size=16)
        result = FITTED[recipe].run(FitRequest(dump, options, weights, "cpu"))
        inverts(result.key, D)
        inverts(result.value, V)
        assert result.key.centers is not None
        assert result.key.centers.shape == (2, KV_HEADS, D)
    mean = FitOptions(context=0, bits=BitGoal(mean=3.5), group_size=16)
    with pytest.raises(OptionError, match="must be widths such as k3v2 where heads of keys and values differ in size"):
        FITTED[recipe].run(FitRequest(dump, mean, weights, "cpu"))


def test_what_is_written_and_read(dump: Path, tmp_path: Path) -> None:
    """A manifest that says other heads; the built-in matrix of the size of MiMo's keys."""
    facts = {"num_layers": 2, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": D}
    DumpManifest(**facts).write(dump)
    with pytest.raises(DumpError, match=r"are \(4, 2, 48, 32\), manifest.json says \(4, 2, 48, 48\)"):
        DumpReader(dump).load(0, 1)
    built = load_rotation("hadamard", num_layers=1, head_dim=192, side="k").rotations[0]
    assert torch.equal((built * 192**0.5).round().abs(), torch.ones(192, 192))
    assert torch.allclose(built @ built, torch.eye(192), atol=1e-5)
