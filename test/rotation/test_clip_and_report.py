"""Clip ratios minimize the stated objective on requests the covariances never saw; the report measures serving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_kernels.codec import clip, dequantize, quantize
from oscar_rotation.cli import app
from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.fit.clip import CLIP_GRID, fit_clip_ratio
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.result import FitResult
from oscar_rotation.fit.samples import HeadSample, head_samples, plan_samples
from oscar_rotation.load import load_rotation
from oscar_rotation.math.quantized import quantized, quantized_at
from oscar_rotation.recipes.paper import fit
from oscar_rotation.report.inspect import describe
from oscar_rotation.report.layer_report import importance

MakeDump = Callable[..., Path]
runner = CliRunner()
D = 64


def samples_of(seed: int, tokens: int = 90, outliers: float = 1.0) -> list[HeadSample]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, D, generator=generator) for heads in (4, 2, 2))
    k[:, :, 3] *= outliers
    return head_samples(q, k, v, [tokens], D**-0.5)


def test_requests_are_chosen_whole_from_the_end() -> None:
    lengths = {1: (100, 200), 2: (50,), 3: (40, 60)}
    assert plan_samples(lengths, 50) == {3: 1}
    assert plan_samples(lengths, 90) == {3: 0}
    assert plan_samples(lengths, 10**6) == {3: 0}  # a quarter of all tokens at most
    assert plan_samples({1: (10,)}, 5) == {}
    assert plan_samples({1: (10, 1000)}, 5) == {1: 1}  # one request at least


def test_several_ratios_at_once_equal_the_codec() -> None:
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(0))
    for ratio, got in zip(CLIP_GRID, quantized_at(x, CLIP_GRID, 32), strict=True):
        assert torch.equal(got, dequantize(*quantize(clip(x, ratio), 32)))


def test_clip_ratio_minimizes_the_attention_error() -> None:
    samples = samples_of(0)
    rotations = torch.linalg.qr(torch.randn(2, D, D, generator=torch.Generator().manual_seed(1)))[0]
    for side in ("k", "v"):
        ratio, errors = fit_clip_ratio(side, rotations, samples, D)  # type: ignore[arg-type]
        assert set(errors) == set(CLIP_GRID)
        by_hand = {}
        for candidate in CLIP_GRID:
            total = 0.0
            for sample in samples:
                exact, rotation = sample.k if side == "k" else sample.v, rotations[sample.head]
                other = quantized(exact @ rotation, candidate, D) @ rotation.mT
                other = torch.cat([exact[: sample.sink], other[sample.sink :]])
                k, v = (other, sample.v) if side == "k" else (sample.k, other)
                scores = (sample.q.transpose(0, 1) @ k.T) * sample.sm_scale
                scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
                total += float((torch.softmax(scores, -1) @ v - sample.exact.view(2, -1, D)).square().sum())
            by_hand[candidate] = total / sum(sample.energy for sample in samples)
            assert errors[candidate] == pytest.approx(by_hand[candidate], rel=1e-3)
        assert ratio == min(by_hand, key=lambda r: by_hand[r])


def test_outliers_ask_for_more_clipping() -> None:
    rotations = torch.eye(D).expand(2, -1, -1)
    wild, errors = fit_clip_ratio("k", rotations, samples_of(1, outliers=6.0), D)
    assert wild < 1
    assert errors[wild] < 0.9 * errors[1.0]


def test_held_out_requests_take_no_part_in_the_covariances(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path / "all")
    options = FitOptions(fit_clip=True, holdout_tokens=60)
    fitted = fit(root, options, device="cpu")
    expected = fit_on_first_requests(root, chunk=3, requests=1)
    assert torch.equal(fitted.key.rotations, expected.key.rotations)
    assert fitted.key.metadata.calibration["tokens"] == 201
    assert fitted.key.metadata.calibration["held_out_tokens"] == 64
    for rotations in (fitted.key, fitted.value):
        assert rotations.clip_ratios is not None
        assert len(rotations.clip_ratios) == 2
        assert set(rotations.clip_ratios) <= set(CLIP_GRID)


def fit_on_first_requests(root: Path, chunk: int, requests: int) -> FitResult:
    """Cut a chunk to its first requests, on disk, and fit."""
    for layer in range(2):
        folder = root / f"layer_{layer}"
        lengths = torch.load(folder / f"seq_lens/{chunk}.pt", weights_only=True)[:requests]
        torch.save(lengths, folder / f"seq_lens/{chunk}.pt")
        for kind in "qkv":
            path = folder / kind / f"{chunk}.pt"
            torch.save(torch.load(path, weights_only=True)[: int(lengths.sum())].clone(), path)
    return fit(root, device="cpu")


def test_a_report_does_not_change_the_fit(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path)
    plain, reported = fit(root, device="cpu"), fit(root, FitOptions(report=True, group_size=16), device="cpu")
    assert torch.equal(plain.value.rotations, reported.value.rotations)
    assert plain.report == {}
    for layer in reported.report["layers"]:
        chosen, hadamard, identity = (layer["k"][name] for name in ("chosen", "hadamard", "identity"))
        assert chosen["importance"] == pytest.approx(1, abs=1e-4)
        assert identity["importance"] > 2
        assert layer["v"]["chosen"]["importance"] == pytest.approx(1, abs=1e-4)
        assert len(chosen["group_ranges"]) == 2
        assert 0 < chosen["logit_error"] < 1
        assert hadamard["residual"] > 0
        assert layer["output_error"]["chosen"] > 0
        assert (layer["k_clip"], layer["v_clip"]) == (0.96, 0.92)


def test_logit_error_is_equation_1(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path, layers=1, requests=[[5], [40], [30]])
    result = fit(root, FitOptions(report=True, holdout_tokens=10), device="cpu")
    chunk = DumpReader(root).load(0, 2)
    q, k = chunk.q.double(), chunk.k.double()
    rotation = result.key.rotations[0].double()
    error = energy = 0.0
    for head in range(2):
        restored = quantized((k[:, head] @ rotation).float(), 0.96, 32).double() @ rotation.T
        queries = q[:, 2 * head : 2 * head + 2].flatten(0, 1)
        error += float((queries @ (restored - k[:, head]).T).square().sum())
        energy += float((queries @ k[:, head].T).square().sum())
    assert result.report["layers"][0]["k"]["chosen"]["logit_error"] == pytest.approx(error / energy, rel=1e-2)


def test_importance_of_a_diagonal_metric() -> None:
    metric = torch.diag(torch.tensor([4.0, 1, 1, 2], dtype=torch.float64))[None]
    assert importance(torch.eye(4)[None], metric) == pytest.approx(2.0)


def test_one_request_is_too_few(tmp_path: Path, make_dump: MakeDump) -> None:
    with pytest.raises(DumpError, match="holds one request"):
        fit(make_dump(tmp_path, requests=[[5], [50]]), FitOptions(fit_clip=True), device="cpu")


def test_commands(tmp_path: Path, make_dump: MakeDump) -> None:
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    command = [
        "fit",
        str(dump),
        "--out",
        str(out),
        "--recipe",
        "paper",
        "--clip",
        "fit",
        "--report",
        "--composition",
        "r_h",
    ]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    keys = load_rotation(out / "k_rotation_qqt_r_h.pt", num_layers=2, head_dim=32, side="k")
    assert keys.clip_ratios is not None
    content = json.loads((out / "fit_report.json").read_text())
    assert [layer["k_clip"] for layer in content["layers"]] == list(keys.clip_ratios)
    shown = runner.invoke(app, ["report", str(out)])
    assert shown.exit_code == 0, shown.output
    for word in ("keys: chosen / Hadamard / identity", "logit error", "fitted clip ratios"):
        assert word in shown.output
    missing = runner.invoke(app, ["report", str(dump)])
    assert missing.exit_code == 1
    assert "fit with --report" in missing.stderr
    (out / "fit_report.json").write_text("{}")
    assert "not a fit report" in runner.invoke(app, ["report", str(out)]).stderr


def test_layers_are_named_by_their_ids_in_the_model(tmp_path: Path, make_dump: MakeDump) -> None:
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    DumpManifest(num_layers=2, layer_ids=(1, 3), q_heads=4, kv_heads=2, head_dim=32).write(dump)
    result = runner.invoke(app, ["fit", str(dump), "--out", str(out), "--recipe", "paper", "--report"])
    assert result.exit_code == 0, result.output
    content = json.loads((out / "fit_report.json").read_text())
    assert [layer["layer"] for layer in content["layers"]] == [1, 3]
    shown = [describe(path) for path in out.glob("*.safetensors")]
    assert [[layer["layer"] for layer in file["layers"]] for file in shown] == [[1, 3]] * 2


def test_plots(tmp_path: Path, make_dump: MakeDump) -> None:
    out = tmp_path / "out"
    runner.invoke(app, ["fit", str(make_dump(tmp_path / "dump")), "--out", str(out), "--recipe", "paper", "--report"])
    result = runner.invoke(app, ["report", str(out), "--plots", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "errors.png",
        "quantizer.png",
        "spectra.png",
    ]
