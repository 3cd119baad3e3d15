"""Fitting: the rotation is that of the stated covariance, and the same at every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import DumpError, DumpManifest, DumpReader, DumpWriter
from oscar_rotation.files.rotation_set import check_rotation_set
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.targets import KEY_TARGETS, METHODS, VALUE_TARGETS
from oscar_rotation.math.covariance import CovarianceAccumulator, QueryCovariance, ScoreValueCovariance
from oscar_rotation.math.eigenbasis import EigenOrder
from oscar_rotation.recipes.paper import fit

MakeDump = Callable[..., Path]


def accumulate(target: CovarianceAccumulator, reader: DumpReader, layer: int, chunks: list[int]) -> torch.Tensor:
    for chunk in (reader.load(layer, index) for index in chunks):
        target.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
    return target.shared()


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("include_warmup", [False, True])
def test_rotation_belongs_to_the_covariance_of_its_layer(
    tmp_path: Path, make_dump: MakeDump, order: EigenOrder, include_warmup: bool
) -> None:
    reader = DumpReader(make_dump(tmp_path))
    result = fit(reader, FitOptions(order=order, include_warmup=include_warmup), device="cpu")
    chunks = [0, 1, 2, 3] if include_warmup else [1, 2, 3]
    for layer in range(2):
        for rotations, target in (
            (result.key, QueryCovariance(2, 32)),
            (result.value, ScoreValueCovariance(2, 32)),
        ):
            covariance = accumulate(target, reader, layer, chunks)
            rotation = rotations.rotations[layer].double()
            importance = (rotation.T @ covariance @ rotation).diagonal()
            assert torch.allclose(importance, importance.mean().expand(32), rtol=1e-5)
            assert rotations.eigenvalues is not None
            expected = torch.linalg.eigvalsh(covariance).float()
            if order == "descending":
                expected = expected.flip(0)
            assert torch.allclose(rotations.eigenvalues[layer], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value_target", VALUE_TARGETS)
@pytest.mark.parametrize("key_target", KEY_TARGETS)
def test_refit_is_identical(tmp_path: Path, make_dump: MakeDump, key_target: str, value_target: str) -> None:
    root = make_dump(tmp_path)
    options = FitOptions(key_target=key_target, value_target=value_target)
    first, second = fit(root, options, device="cpu"), fit(root, options, device="cpu")
    for a, b in ((first.key, second.key), (first.value, second.value)):
        check_rotation_set(a, "fitted")
        assert torch.equal(a.rotations, b.rotations)
        assert a.metadata == b.metadata
        assert (a.eigenvalues is None) == (b.eigenvalues is None) == (a.metadata.objective == "hadamard")
        if a.eigenvalues is not None and b.eigenvalues is not None:
            assert torch.equal(a.eigenvalues, b.eigenvalues)


def test_targets_differ(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path)
    keys = [fit(root, FitOptions(key_target=name), device="cpu").key.rotations for name in KEY_TARGETS]
    values = [fit(root, FitOptions(value_target=name), device="cpu").value.rotations for name in VALUE_TARGETS]
    for group in (keys, values):
        for i, a in enumerate(group):
            assert all((a - b).abs().max() > 1e-2 for b in group[i + 1 :])


def test_shards_fit_like_whole_heads(tmp_path: Path, make_dump: MakeDump) -> None:
    plain = fit(make_dump(tmp_path / "plain"), device="cpu")
    sharded = fit(make_dump(tmp_path / "tp", tp_size=4), device="cpu")
    assert torch.equal(plain.key.rotations, sharded.key.rotations)
    assert torch.equal(plain.value.rotations, sharded.value.rotations)


def test_metadata_and_remarks(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path)
    DumpManifest(model_id="m", model_hash="h", num_layers=2, q_heads=4, kv_heads=2, head_dim=32).write(root)
    steps: list[tuple[int, int]] = []
    result = fit(root, device="cpu", progress=lambda done, total: steps.append((done, total)))
    for rotations, side, objective in ((result.key, "k", "qqt"), (result.value, "v", "sst")):
        metadata = rotations.metadata
        assert (metadata.side, metadata.objective, metadata.composition) == (side, objective, "r_h_pbr")
        assert (metadata.eigen_order, metadata.model_id, metadata.model_hash) == ("ascending", "m", "h")
        assert (metadata.calibration["tokens"], metadata.calibration["requests"]) == (265, 5)
    assert result.remarks == ()
    assert steps == [(i, 6) for i in range(1, 7)]
    few = fit(make_dump(tmp_path / "few", requests=[[5], [40]]), device="cpu")
    assert "only 40 calibration tokens" in few.remarks[0]


def test_logit_scale_of_the_manifest_is_used(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path)
    before = fit(root, device="cpu").value
    DumpManifest(num_layers=2, q_heads=4, kv_heads=2, head_dim=32, sm_scale=1.0).write(root)
    after = fit(root, device="cpu").value
    assert before.eigenvalues is not None
    assert after.eigenvalues is not None
    assert not torch.allclose(before.eigenvalues, after.eigenvalues, rtol=1e-2)


def test_methods_pair_known_targets() -> None:
    for method, (key_target, value_target) in METHODS.items():
        options = FitOptions.of_method(method)
        assert (options.key_target, options.value_target) == (key_target, value_target)
    assert FitOptions.of_method("qqt_sst", value_target="vtv") == FitOptions("qqt", "vtv")
    assert FitOptions() == FitOptions.of_method("qqt_sst")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="method must be one of qqt_sst"):
        FitOptions.of_method("magic")
    with pytest.raises(ValueError, match="value_target must be one of sst, proxy, vtv, uresidual, hadamard"):
        FitOptions(value_target="qqt")
    with pytest.raises(ValueError, match="unknown device"):
        choose_device("abacus")
    with pytest.raises(ValueError, match="use auto, cpu or cuda"):
        choose_device("meta")


def test_head_dim_must_be_a_power_of_two(tmp_path: Path, make_dump: MakeDump) -> None:
    with pytest.raises(DumpError, match="head_dim is 40"):
        fit(make_dump(tmp_path, head_dim=40), device="cpu")


def test_layers_must_hold_the_same_requests(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path)
    q, kv = torch.zeros(80, 4, 32), torch.zeros(80, 2, 32)
    DumpWriter(root, total_kv_heads=2).write(1, 1, q, kv, kv, [80])
    with pytest.raises(DumpError, match="chunk 1 of layer 1 holds other requests"):
        fit(root, device="cpu")
