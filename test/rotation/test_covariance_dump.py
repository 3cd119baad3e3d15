"""Covariances accumulated while serving give the rotations that the activations give, for every sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpError, DumpManifest, DumpReader, DumpWriter
from oscar_rotation.dump.covariances import CovarianceWriter, is_covariance_dump, read_covariances
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes.paper import fit

MakeDump = Callable[..., Path]


def stream(source: Path, root: Path, tp_size: int = 1, complete: bool = True) -> Path:
    """Feed a dump of activations, as a server would, to one writer of covariances per rank."""
    reader = DumpReader(source)
    for rank in range(tp_size):
        shares = DumpWriter(root, total_kv_heads=2, tp_rank=rank, tp_size=tp_size)
        writer = CovarianceWriter(
            root,
            num_layers=2,
            kv_shard=shares.kv_shard,
            kv_shards=shares.kv_shards,
            tp_rank=rank,
            tp_size=tp_size,
            sm_scale=32**-0.5,
        )
        for chunk in reader.chunks:
            for layer in range(2):
                content = reader.load(layer, chunk)
                q = content.q.chunk(tp_size, 1)[rank]
                k, v = (x.chunk(shares.kv_shards, 1)[shares.kv_shard] for x in (content.k, content.v))
                writer.write(layer, chunk, q, k, v, content.seq_lens)
        writer.finish()
    manifest = DumpManifest(num_layers=2, q_heads=4, kv_heads=2, head_dim=32, tp_size=tp_size, complete=complete)
    manifest.write(root)
    return root


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("method", ["qqt_sst", "ktk_vtv", "hadamard"])
def test_streamed_rotations_equal_dumped_ones(tmp_path: Path, make_dump: MakeDump, tp_size: int, method: str) -> None:
    dump = make_dump(tmp_path / "dump")
    root = stream(dump, tmp_path / "streamed", tp_size)
    options = FitOptions.of_method(method)
    dumped, streamed = fit(dump, options, device="cpu"), fit(root, options, device="cpu")
    for a, b in ((dumped.key, streamed.key), (dumped.value, streamed.value)):
        assert (a.rotations - b.rotations).abs().max() < 1e-5
        assert a.metadata.calibration["tokens"] == b.metadata.calibration["tokens"] == 265
        assert (a.eigenvalues is None) == (b.eigenvalues is None)
        if a.eigenvalues is not None and b.eigenvalues is not None:
            assert torch.allclose(a.eigenvalues, b.eigenvalues, rtol=1e-5)


def test_per_head_and_command(tmp_path: Path, make_dump: MakeDump) -> None:
    dump = make_dump(tmp_path / "dump")
    root = stream(dump, tmp_path / "streamed")
    options = FitOptions(share="kv_head")
    difference = fit(dump, options, device="cpu").value.rotations - fit(root, options, device="cpu").value.rotations
    assert difference.abs().max() < 1e-5
    refused = CliRunner().invoke(app, ["fit", str(root), "--out", str(tmp_path / "out")])
    assert refused.exit_code == 1
    assert "holds covariances; the recipe focus needs a dump of activations, --recipe paper does not" in refused.stderr
    assert refused.stderr.count("\n") == 1
    result = CliRunner().invoke(app, ["fit", str(root), "--out", str(tmp_path / "out"), "--recipe", "paper"])
    assert result.exit_code == 0, result.output
    assert "265 tokens of 5 requests" in result.output


def test_broken_and_unfit_dumps_are_refused(tmp_path: Path, make_dump: MakeDump) -> None:
    dump = make_dump(tmp_path / "dump")
    assert not is_covariance_dump(dump)
    interrupted = stream(dump, tmp_path / "interrupted", complete=False)
    with pytest.raises(DumpError, match="interrupted before its covariances were complete"):
        fit(interrupted, device="cpu")
    root = stream(dump, tmp_path / "whole", tp_size=2)
    for options, fault in (
        (FitOptions(value_target="proxy"), "target proxy needs a dump of activations"),
        (FitOptions(fit_clip=True), "clip ratios and a report need a dump of activations"),
    ):
        with pytest.raises(DumpError, match=fault):
            fit(root, options, device="cpu")
    shard = root / "covariances.tp1of2.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(DumpError, match="probably truncated"):
        read_covariances(root)
    shard.unlink()
    with pytest.raises(DumpError, match=r"tp1of2\.safetensors: missing"):
        read_covariances(root)
