"""What ``oscar prove`` dumps and fits, and when a fit is another."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import model_settings
from oscar_tools.calibration.dump_driver import DumpTask
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.cli import app
from oscar_tools.evaluation.prove import calibration as calibrating
from oscar_tools.evaluation.prove import command
from oscar_tools.evaluation.prove.calibration import Calibration, forget_fits
from oscar_tools.evaluation.prove.measures.tail_kl import TailKl
from oscar_tools.evaluation.prove.specs import Spec
from oscar_tools.evaluation.prove.texts import MEASUREMENT, Texts
from support.reference import MODEL


class Fits:
    """Fits that leave empty files, and one dump."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.dumps = 0
        patch.setattr(calibrating, "run_dump", self.dump)
        patch.setattr(calibrating, "run_fit", self.fit)

    def fit(self, folder: CalibrationFolder, recipe: str, options: FitOptions, out: Path) -> Path:
        self.groups.append(options.group_size)
        out.mkdir(parents=True)
        for side in "kv":
            (out / f"{side}_rotation_x.safetensors").touch()
        return out

    def dump(self, request: DumpTask) -> CalibrationFolder:
        self.dumps += 1
        return CalibrationFolder(request.root)


def test_the_model_says_bits_on_the_calibration_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fit is given are the texts that are dumped, for fits that ask for it, each in a folder of its own."""
    fits: dict[str, FitOptions] = {}

    def fitted(folder: CalibrationFolder, recipe: str, options: FitOptions, out: Path) -> Path:
        fits[out.name.rpartition("-")[0]] = options
        return out

    monkeypatch.setattr(calibrating, "run_dump", lambda request: CalibrationFolder(request.root))
    monkeypatch.setattr(calibrating, "run_fit", fitted)
    text = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"document {number}: " + "some words " * 700}) for number in range(30)]
    text.write_text("\n".join(rows), encoding="utf-8")
    texts = Texts(AutoTokenizer.from_pretrained(MODEL), text)
    calibration = Calibration(model_settings("m").overridden(group_size=128), {}, texts, 8192, tmp_path / "out", ())
    for fit in (Spec("plus"), Spec("plus", "3.0"), Spec("focus", "3.0", by_model=True)):
        calibration.rotations(fit)
    prompts = [json.loads(line)["text"] for line in calibration.prepare().read_text(encoding="utf-8").splitlines()]
    assert {name: options.text for name, options in fits.items()} == {
        "plus-g128": None, "plus-g128-3.0": None, "focus-g128-3.0-by-model": tuple(prompts),
    }  # fmt: skip
    measured = texts.documents(MEASUREMENT)[text.stem]
    assert measured
    assert not any(document[:20] in prompt for document in measured for prompt in prompts)


def test_prompts_do_not_begin_twice(tmp_path: Path) -> None:
    """The dump adds what a model expects in front of a text."""
    texts = Texts(AutoTokenizer.from_pretrained(MODEL))
    texts.leading = texts.encode("BEGINNING")
    path = Calibration(model_settings("m"), {}, texts, 8192, tmp_path, ()).prepare()
    prompts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) >= 8
    assert not any("BEGINNING" in prompt for prompt in prompts)


def test_groups_of_all_sizes_are_fitted_to_one_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of bits counts scales and zero points, so its plan depends on the group size."""
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    found = []
    for own, group in ((64, None), (128, None), (128, 64), (64, 128)):
        settings = model_settings("m").overridden(group_size=own)
        found.append(Calibration(settings, {}, texts, 8192, tmp_path, ()).rotations(Spec("plus", "3.0", group=group)))
    assert fits.groups == [64, 128]
    assert found == [found[0], found[1]] * 2


def test_a_fit_is_not_older_than_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed recipe fits anew, to the same dump; answers that depend on it are asked anew, as its files differ."""
    package = tmp_path / "oscar_rotation"
    recipe = package / "recipes" / "plus.py"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("KEY_ROWS = 1\n")
    module = ModuleType("oscar_rotation")
    module.__file__ = str(package / "__init__.py")
    monkeypatch.setattr(calibrating, "FITTING", {module: ()})
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    calibration = Calibration(model_settings("m"), {}, texts, 8192, tmp_path / "out", ())
    first = calibration.rotations(Spec("plus"))
    assert calibration.rotations(Spec("plus")) == first
    recipe.write_text("KEY_ROWS = 2\n")
    assert calibration.rotations(Spec("plus")) != first
    forget_fits(tmp_path / "out")
    calibration.rotations(Spec("plus"))
    assert (len(fits.groups), fits.dumps) == (3, 1)
    assert calibration.prepare().exists()


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 32768}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "context"),
    [
        (["--lengths", "2048"], 2048 + 640),
        (["--lengths", "2048", "--measure", "session"], None),
        (["--lengths", "8128"], None),
        (["--lengths", "2048", "--fit-context", "4096"], 4096),
        (["--lengths", "20480", "--server-args", f"--json-model-override-args '{json.dumps(YARN)}'"], 20480 + 640),
        (["--lengths", "32704", "--server-args", f"--json-model-override-args '{json.dumps(YARN)}'"], None),
    ],
)
def test_fits_cover_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], context: int | None
) -> None:
    made: list[Calibration] = []

    def stop(caches: Any, maker: Any, calibration: Calibration) -> None:
        made.append(calibration)
        raise DataError("enough")

    monkeypatch.setattr(command, "_makers", stop)
    monkeypatch.setattr(TailKl, "prepare", lambda self: None)
    measure = [] if "--measure" in arguments else ["--measure", "tail-kl"]
    done = CliRunner().invoke(app, ["prove", str(MODEL), "--out", str(tmp_path), *measure, *arguments])
    assert done.stderr == "error: enough\n"
    assert made[0].context == context
    assert (json.dumps(YARN) in made[0].server_args) == ("--server-args" in arguments)


def test_a_fit_for_another_context_is_another_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    found = {
        Calibration(model_settings("m"), {}, texts, 8192, tmp_path, (), context).rotations(Spec("plus"))
        for context in (None, 4096, 4096)
    }
    assert len(found) == len(fits.groups) == 2
