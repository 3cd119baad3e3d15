"""Variables and options of the drivers say what they seem to: which dump, which model, which word is a value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from test_drivers import ROTATION, run_script
from typer.testing import CliRunner

from oscar_tools.calibration import commands
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.option_groups import ServerOptions
from oscar_tools.cli import app


@pytest.mark.parametrize("by", ["option", "variable"])
def test_exactly_the_given_dump_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Whatever its name, and whether or not one of the usual name lies beside it."""
    fitted: list[Path] = []

    def fit(folder: CalibrationFolder, recipe: str, *_: Any) -> Path:
        fitted.append(folder.dump)
        return folder.rotations(recipe)

    monkeypatch.setattr(commands, "run_fit", fit)
    for name in ("copied", "qkv_dumps"):
        (tmp_path / name).mkdir()
    for name in ("copied", "qkv_dumps"):
        given = {"option": ["--dump-dir", str(tmp_path / name)], "variable": []}[by]
        env = {"option": {}, "variable": {"DUMP_DIR": str(tmp_path / name)}}[by]
        done = CliRunner().invoke(app, ["rotate", "m", *given], env=env)
        assert done.exit_code == 0, done.output
        assert done.stdout == f"fitting {tmp_path / name}\nrotations: {tmp_path / 'rotations_focus'}\n"
    assert fitted == [tmp_path / "copied", tmp_path / "qkv_dumps"]


def test_a_folder_name_of_the_table_is_a_model_too() -> None:
    """The scripts take one as MODEL and export it; servers know hub ids and paths."""
    for given, model in (
        ("qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("./qwen3-8B", "./qwen3-8B"),
        ("mine/qwen", "mine/qwen"),
        ("", "Qwen/Qwen3-8B"),
        (None, "Qwen/Qwen3-8B"),
    ):
        settings = ServerOptions(model=given).settings("qwen3-8B", None)
        assert (settings.name, settings.model) == ("qwen3-8B", model), given


def test_a_model_needs_a_name() -> None:
    for command in ("dump", "rotate", "eval"):
        done = CliRunner().invoke(app, [command, ""])
        assert done.exit_code == 2, done.output
        assert "is empty" in done.stderr


def test_a_word_behind_an_option_is_its_value(tmp_path: Path) -> None:
    said, env = run_script(
        ROTATION / "qwen3-8B/save_qkv_qwen3-8B.sh", tmp_path,
        "--dataset-path", "GPQA=/x.csv", "DATASET=GPQA", "--covariances", "TP_SIZE=2", "--tokens=8000", "GPU=1",
    )  # fmt: skip
    assert said[4:] == ["--dataset-path", "GPQA=/x.csv", "--covariances", "--tokens=8000"]
    assert {name: env.get(name) for name in ("DATASET", "TP_SIZE", "GPU", "GPQA")} == {
        "DATASET": "GPQA", "TP_SIZE": "2", "GPU": "1", "GPQA": None,
    }  # fmt: skip


def test_the_script_knows_options_without_a_value() -> None:
    known = re.search(r'^flags="(.*)"$', (ROTATION / "oscar.sh").read_text(), re.MULTILINE)
    assert known
    found = {"--help"}
    group: Any = typer.main.get_command(app)
    for name in ("dump", "rotate", "eval", "ablation"):
        for parameter in group.commands[name].params:
            if getattr(parameter, "is_flag", False):
                found |= {*parameter.opts, *parameter.secondary_opts}
    assert set(known[1].split()) == found
