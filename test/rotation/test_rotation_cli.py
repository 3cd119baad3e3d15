"""The commands, end to end in processes of their own: dump in, rotation files out, errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpManifest
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.load import load_rotation

MakeDump = Callable[..., Path]
K_NAME, V_NAME = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"
runner = CliRunner()


def test_fit_then_inspect_in_processes(tmp_path: Path, make_dump: MakeDump) -> None:
    command = [sys.executable, "-m", "oscar_rotation"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    fitted = subprocess.run(
        [*command, "fit", str(dump), "--out", str(out), "--recipe", "paper"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert fitted.returncode == 0, fitted.stderr
    assert f"wrote {out / K_NAME}" in fitted.stdout
    assert f"wrote {out / V_NAME}" in fitted.stdout
    assert sorted(path.name for path in out.iterdir()) == [K_NAME, V_NAME]
    load_rotation(out / K_NAME, num_layers=2, head_dim=32, side="k")
    load_rotation(out / V_NAME, num_layers=2, head_dim=32, side="v")

    (dump / "layer_1/k/2.pt").unlink()
    failed = runner.invoke(app, ["fit", str(dump), "--out", str(out / "second")])
    assert failed.exit_code == 1
    assert failed.stderr.startswith(f"error: {dump / 'layer_1/k/2.pt'}: missing")
    assert failed.stderr.count("\n") == 1
    assert not (out / "second").exists()


def test_fit_options_reach_the_files(tmp_path: Path, make_dump: MakeDump) -> None:
    arguments = [
        "fit",
        str(make_dump(tmp_path / "dump")),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--recipe",
        "paper",
    ]
    arguments += ["--method", "ktk_vtv", "--value-target", "proxy", "--order", "descending", "--format", "both"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for name, side in (("k_rotation_ktk_r_h_pbr", "k"), ("v_rotation_proxy_r_h_pbr", "v")):
        loaded = [
            load_rotation(tmp_path / f"{name}{suffix}", num_layers=2, head_dim=32, side=side)  # type: ignore[arg-type]
            for suffix in (".pt", ".safetensors")
        ]
        assert torch.equal(loaded[0].rotations, loaded[1].rotations)
        assert loaded[0].metadata == loaded[1].metadata
        assert loaded[0].metadata.eigen_order == "descending"


def test_a_refit_writes_the_same_rotations(tmp_path: Path, make_dump: MakeDump) -> None:
    dump = make_dump(tmp_path / "dump")
    for name in ("one", "two"):
        assert runner.invoke(app, ["fit", str(dump), "--out", str(tmp_path / name), "--recipe", "paper"]).exit_code == 0
    for file in (K_NAME, V_NAME):
        one, two = (torch.load(tmp_path / name / file, weights_only=True)["layers"] for name in ("one", "two"))
        assert all(torch.equal(one[layer]["rotation"], two[layer]["rotation"]) for layer in one)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_inspect_json(tmp_path: Path, rotation_set: RotationSet, suffix: str) -> None:
    path = tmp_path / f"k{suffix}"
    save_rotation_file(path, rotation_set)
    result = runner.invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["num_layers"], content["head_dim"], content["side"]) == (3, 64, "k")
    assert content["model_id"] == "some/model"
    assert content["orthogonality_error"] < 1e-5
    assert [layer["clip_ratio"] for layer in content["layers"]] == [0.96, 0.9, 1.0]
    assert rotation_set.eigenvalues is not None
    spectrum = content["layers"][0]["spectrum"]
    values = rotation_set.eigenvalues[0].double()
    assert spectrum["top"] == values.flip(0)[:8].tolist()
    assert spectrum["condition"] == pytest.approx(float(values.max() / values.min()))
    share = values / values.sum()
    assert spectrum["effective_rank"] == pytest.approx(float((-(share * share.log()).sum()).exp()))


def test_inspect_table(tmp_path: Path, rotation_set: RotationSet) -> None:
    save_rotation_file(tmp_path / "k.pt", rotation_set)
    result = runner.invoke(app, ["inspect", str(tmp_path / "k.pt")])
    assert result.exit_code == 0, result.output
    for word in ("objective", "qqt", "some/model", "0.960", "condition"):
        assert word in result.output


def test_inspect_of_a_file_without_spectrum(tmp_path: Path) -> None:
    path = tmp_path / "k.safetensors"
    save_rotation_file(path, load_rotation("hadamard", num_layers=1, head_dim=64, side="k"))
    assert json.loads(runner.invoke(app, ["inspect", str(path), "--json"]).stdout)["layers"][0]["spectrum"] is None
    assert runner.invoke(app, ["inspect", str(path)]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "fault"),
    [
        (["inspect", "none.pt"], 1, "error: none.pt: no such file"),
        (["fit", "nowhere", "--out", "out"], 1, "error: nowhere: no such folder"),
        (["fit", "nowhere"], 2, "--out"),
        (["fit", "nowhere", "--out", "out", "--order", "sideways"], 2, "not one of ascending, descending"),
        (
            ["fit", "nowhere", "--out", "out", "--value-target", "qqt"],
            2,
            "not one of sst, proxy, vtv, uresidual, hadamard",
        ),
        (["fit", "nowhere", "--out", "out", "--device", "abacus"], 2, "unknown device"),
        (
            ["fit", "nowhere", "--out", "out", "--group-size", "64"],
            2,
            "--group-size: has no meaning without a mean of --bits",
        ),
        (["fit", "nowhere", "--out", "out", "--clip", "fit"], 2, "--recipe paper takes it"),
        (
            ["fit", "nowhere", "--out", "out", "--recipe", "paper", "--bits", "3"],
            2,
            "--bits: has no meaning for --recipe",
        ),
        (["fit", "nowhere", "--out", "out", "--recipe", "paper", "--context", "9"], 2, "--context: has no meaning for"),
        (
            ["fit", "nowhere", "--out", "out", "--recipe", "paper", "--group-size", "3"],
            2,
            "--group-size: must be a power",
        ),
        (["inspect"], 2, "Missing argument"),
    ],
)
def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, fault: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert result.exit_code == code
    assert fault in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, make_dump: MakeDump) -> None:
    (tmp_path / "file").write_text("")
    result = runner.invoke(
        app, ["fit", str(make_dump(tmp_path / "dump")), "--out", str(tmp_path / "file" / "out"), "--recipe", "paper"]
    )
    assert result.exit_code == 2
    assert f"--out: {tmp_path / 'file'} is no folder" in " ".join(result.stderr.replace("│", " ").split())


PAPER = ["--recipe", "paper"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([*PAPER, "--holdout-tokens", "64"], "--holdout-tokens: has no meaning without --clip fit or --report"),
        ([*PAPER, "--group-size", "64"], "--group-size: has no meaning without --clip fit or --report"),
        (
            [*PAPER, "--method", "qqt_sst", "--key-target", "ktk", "--value-target", "vtv"],
            "--method: has no meaning beside --key-target and --value-target",
        ),
        (
            ["--context", "0", "--json-model-override-args", "{}"],
            "--json-model-override-args: has no meaning with --context 0",
        ),
    ],
)
def test_options_that_would_do_nothing(tmp_path: Path, arguments: list[str], fault: str) -> None:
    result = runner.invoke(app, ["fit", str(tmp_path), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert fault in " ".join(result.stderr.replace("│", " ").replace("Invalid value for ", "").split())


def test_a_folder_with_files_of_another_fit(tmp_path: Path, make_dump: MakeDump) -> None:
    """Is refused before the fit; the same fit again replaces its files."""
    dump, out = make_dump(tmp_path / "dump"), tmp_path / "out"
    command = ["fit", str(dump), "--out", str(out), *PAPER]
    assert runner.invoke(app, [*command, "--report"]).exit_code == 0
    assert runner.invoke(app, [*command, "--report", "--order", "descending"]).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for arguments, others in (
        ([], "fit_report.json"),
        (["--report", "--method", "ktk_vtv"], f"{K_NAME}, {V_NAME}"),
        (["--report", "--format", "safetensors"], f"{K_NAME}, {V_NAME}"),
    ):
        result = runner.invoke(app, [*command, *arguments], env={"COLUMNS": "400"})
        assert result.exit_code == 2, result.output
        assert f"{out} holds {others} of another fit; remove that, or name another folder" in result.stderr
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_layers_that_no_pt_file_holds(tmp_path: Path, make_dump: MakeDump) -> None:
    """Told before the fit, which the damaged dump would end."""
    dump = make_dump(tmp_path / "dump")
    facts = {"num_layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "layer_ids": (3, 7)}
    DumpManifest(**facts).write(dump)
    (dump / "layer_1/k/2.pt").unlink()
    command = ["fit", str(dump), "--out", str(tmp_path / "out"), *PAPER, "--format", "both"]
    result = runner.invoke(app, command, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "is of some layers of its model, which are written as .safetensors only" in result.stderr


@pytest.mark.parametrize("content", ["[]", "{}", '{"layers": 3}', '{"layers": [1]}', '{"layers": [{"k": {}}]}'])
def test_a_report_of_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    result = runner.invoke(app, ["report", str(path)])
    assert result.exit_code == 1
    assert result.stderr == f"error: {path}: not a fit report; fit with --report\n"
