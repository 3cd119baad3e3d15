"""The model table, calibration data, folders and scripts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.errors import DumpError, RotationFileError
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import known_models, model_settings
from oscar_tools.calibration import commands
from oscar_tools.calibration.data import calibration_chats, dataset_label, explain_hub_failure, local_data_sets
from oscar_tools.calibration.dump_driver import choose_prompts
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder, dump_state, latest_calibration
from oscar_tools.cli import app
from oscar_tools.evaluation import ablations
from oscar_tools.evaluation.ablations import ABLATIONS
from oscar_tools.evaluation.benchmarks import BENCHMARKS
from oscar_tools.evaluation.methods import RECIPE_OF, TITLES, make_method
from oscar_tools.evaluation.ruler import make_row, write_niah
from support.benchmark_data import gpqa_rows, write_rows

ROTATION = Path(__file__).resolve().parents[2] / "rotation"


def test_the_table_holds_the_published_settings() -> None:
    published = ["qwen3-4B-thinking-2507", "qwen3-8B", "qwen3-32B", "MiniMax-M2.7", "GLM-4.7"]
    hybrids = ["Qwen3-Next-80B-A3B-Thinking", "Qwen3.6-35B-A3B", "Qwen3.6-27B"]
    assert known_models() == published + hybrids
    large, glm = model_settings("qwen3-32B"), model_settings("zai-org/GLM-4.7-FP8")
    assert (large.clip.k, large.clip.v, large.tp_eval) == (0.96, 0.96, 4)
    assert (glm.name, glm.tp_dump, glm.sampling["temperature"], glm.seeds) == ("GLM-4.7", 8, 1.0, 3)
    assert model_settings("MiniMax-M2.7").reasoning_parser == "minimax-append-think"
    assert {model_settings(name).group_size for name in known_models()} == {GROUP_SIZE}
    other = model_settings("some/model").overridden(group_size=64, model=None)
    assert (other.name, other.model, other.group_size, other.clip.v) == ("model", "some/model", 64, 0.92)


def run_script(path: Path, tmp_path: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Run a script with a stand-in interpreter that prints its arguments and environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\necho --\nenv\n')
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "PYTHON": str(python), "DUMP_KVCACHE": "1"}
    done = subprocess.run(["bash", str(path), *arguments], env=env, capture_output=True, text=True, check=True)
    said, _, variables = done.stdout.partition("--\n")
    return said.splitlines(), dict(line.split("=", 1) for line in variables.splitlines() if "=" in line)


@pytest.mark.parametrize("model", known_models())
def test_every_model_has_its_scripts(tmp_path: Path, model: str) -> None:
    expected = {
        f"save_qkv_{model}.sh": ["dump", model],
        "compute_rotation.sh": ["rotate", model],
        "eval_gpqa.sh": ["eval", model, "--benchmarks", "gpqa"],
        "eval_lcb.sh": ["eval", model, "--benchmarks", "lcb_v6_128k"],
    }
    for name, command in expected.items():
        path = ROTATION / model / name
        assert os.access(path, os.X_OK)
        said, env = run_script(path, tmp_path, "DUMP_KVCACHE_TOKENS=8000", "--gpu", "1")
        assert said == ["-m", "oscar_tools", *command, "--gpu", "1"]
        assert env["DUMP_KVCACHE_TOKENS"] == "8000"
        assert Path(env["OSCAR_ROOT"]) == ROTATION
        assert "DUMP_KVCACHE" not in env


def test_generic_scripts_take_any_model(tmp_path: Path) -> None:
    for name, command in (
        ("save_qkv.sh", ["dump", "a/b"]),
        ("compute_rotation.sh", ["rotate", "a/b"]),
        ("eval_oscar_gpqa.sh", ["eval", "a/b", "--benchmarks", "gpqa"]),
        ("eval_oscar_lcb.sh", ["eval", "a/b", "--benchmarks", "lcb_v6_128k"]),
        ("eval_oscar.sh", ["eval", "a/b"]),
    ):
        said, _ = run_script(ROTATION / name, tmp_path, "MODEL=a/b")
        assert said == ["-m", "oscar_tools", *command]
    with pytest.raises(subprocess.CalledProcessError):
        run_script(ROTATION / "save_qkv.sh", tmp_path)


def test_calibration_data_from_local_files(tmp_path: Path) -> None:
    mixed = write_rows(
        tmp_path / "mine.jsonl", [{"text": "plain"}, {"messages": [{"role": "user", "content": "hello"}]}]
    )
    assert list(calibration_chats(str(mixed))) == ["plain", [{"role": "user", "content": "hello"}]]
    assert (dataset_label(str(mixed)), dataset_label("GPQA")) == ("mine", "GPQA")
    (first, *_) = calibration_chats("GPQA", write_rows(tmp_path / "gpqa.jsonl", gpqa_rows()))
    assert "polygon of 3 sides" in first[0]["content"]  # type: ignore[index]
    assert "D) two" in first[0]["content"]  # type: ignore[index]
    mmlu = write_rows(tmp_path / "mmlu.jsonl", [{"question": "1+1?", "choices": ["2", "3"], "answer": 0}])
    assert "A) 2\nB) 3" in next(calibration_chats("MMLU", mmlu))[0]["content"]  # type: ignore[index]
    wiki = write_rows(tmp_path / "wiki.jsonl", [{"text": " = Heading = "}, {"text": "x" * 300}])
    assert list(calibration_chats("WikiText", wiki)) == ["x" * 300]


def test_local_copies_of_one_or_several_data_sets() -> None:
    assert local_data_sets("", "GPQA") == {}
    assert local_data_sets("a.csv", "GPQA") == {"GPQA": Path("a.csv")}
    assert local_data_sets("MMLU=a.jsonl,WikiText=b", "GPQA") == {"MMLU": Path("a.jsonl"), "WikiText": Path("b")}


GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def test_broken_calibration_data_are_named(tmp_path: Path) -> None:
    cases = [
        ("nowhere.jsonl", None, "neither one of GPQA, MMLU, WikiText nor a local"),
        (str(write_rows(tmp_path / "a.jsonl", [{"words": 1}])), None, "needs 'text' or 'messages'"),
        ("GPQA", tmp_path / "none.jsonl", "no such file"),
        ("GPQA", write_rows(tmp_path / "b.jsonl", [{"Question": "?"}]), "lacks the column 'Correct Answer'"),
        (
            "GPQA",
            write_rows(tmp_path / "e.jsonl", [dict.fromkeys(GPQA, "x") | {"Question": None}]),
            "row 1: the column 'Question' is empty",
        ),
        (
            "MMLU",
            write_rows(tmp_path / "f.jsonl", [{"question": float("nan"), "choices": ["a"]}]),
            "row 1: the column 'question' is empty",
        ),
        *(
            (
                str(write_rows(tmp_path / f"g{i}.jsonl", [{"messages": wrong}])),
                None,
                f"g{i}.jsonl:1: every one of 'messages'",
            )
            for i, wrong in enumerate(([], ["x"], [{"role": "user"}], [{"role": "assistant", "content": None}]))
        ),
        ("MMLU", write_rows(tmp_path / "c.txt", []), "expected .jsonl, .csv or .parquet"),
    ]
    for dataset, local, fault in cases:
        with pytest.raises(DataError, match=fault.replace(".", r"\.")):
            list(calibration_chats(dataset, local))
    (tmp_path / "h.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(DataError, match=r"h\.jsonl: is no UTF-8 \(invalid start byte at byte 10\)"):
        list(calibration_chats(str(tmp_path / "h.jsonl")))
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n{"text"')
    with pytest.raises(DataError, match=r"d\.jsonl:2: not JSON"):
        list(calibration_chats(str(tmp_path / "d.jsonl")))
    assert "accept its terms" in explain_hub_failure("a/b", RuntimeError("401 Client Error. Dataset is gated"))
    assert "give a local copy" in explain_hub_failure("a/b", OSError("connection refused"))


class Characters:
    """A tokenizer of one token per character."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def test_prompts_fill_the_budget_exactly() -> None:
    chosen = choose_prompts(Characters(), ["abc", "", "defg", "hij"], 6)
    assert [len(ids) for ids in chosen] == [3, 3]
    assert [len(ids) for ids in choose_prompts(Characters(), ["abc"], 6)] == [3]
    with pytest.raises(DataError, match="holds no prompt"):
        choose_prompts(Characters(), [], 6)


def test_an_interrupted_dump_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    folder = CalibrationFolder.of(tmp_path, "m", "GPQA", 30000, 98, 128)
    assert folder.dump == tmp_path / "m/GPQA/seq30000_prompt98_group128/qkv_dumps"
    assert dump_state(folder.dump) == "none"
    with pytest.raises(DumpError, match="no complete dump; make one with"):
        latest_calibration(tmp_path, "m", "GPQA", None, 128)
    manifest = DumpManifest(num_layers=1, q_heads=1, kv_heads=1, head_dim=32, complete=False)
    manifest.write(folder.dump)
    assert dump_state(folder.dump) == "interrupted"
    with pytest.raises(DumpError, match="no complete dump"):
        latest_calibration(tmp_path, "m", "GPQA", None, 128)
    manifest.model_copy(update={"complete": True}).write(folder.dump)
    assert latest_calibration(tmp_path, "m", "GPQA", None, 128) == folder
    assert latest_calibration(tmp_path, "m", "GPQA", 30000, 128) == folder
    with pytest.raises(DumpError):
        latest_calibration(tmp_path, "m", "GPQA", None, 64)
    (folder.dump / "manifest.json").write_text("{")
    assert dump_state(folder.dump) == "interrupted"


def test_methods_start_the_servers_they_name(tmp_path: Path) -> None:
    settings = model_settings("qwen3-32B")
    with pytest.raises(ValueError, match="needs rotations"):
        make_method("oscar", settings)
    with pytest.raises(RotationFileError, match="holds no k_rotation"):
        make_method("oscar", settings, tmp_path)
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        (tmp_path / name).write_bytes(b"")
    oscar = make_method("oscar", settings, tmp_path)
    assert oscar.env["SGLANG_OSCAR_V_ROTATION_PATH"] == str(tmp_path / "v_rotation_sst_r_h_pbr.pt")
    assert oscar.env["SGLANG_OSCAR_V_CLIP_RATIO"] == "0.96"
    assert "SGLANG_OSCAR_K_CLIP_RATIO" not in make_method("oscar", settings, tmp_path, file_clips=True).env
    assert oscar.env["SGLANG_OSCAR_RECIPE"] == "paper"
    plus = make_method("plus", settings, tmp_path)
    assert plus.env["SGLANG_OSCAR_RECIPE"] == "plus"
    assert not any("CLIP" in variable for variable in plus.env)
    args = oscar.server_args(settings)
    assert args[args.index("--kv-cache-quant-group-size") + 1] == "128"
    assert args[args.index("--tensor-parallel-size") + 1] == "4"
    assert "int2" not in make_method("bf16", settings).server_args(settings)
    (tmp_path / "k_rotation_ktk_r_h_pbr.pt").write_bytes(b"")
    with pytest.raises(RotationFileError, match="2 different k_rotation"):
        rotation_files(tmp_path)

    envs = {name: make_method(name, settings).env for name in TITLES if name not in RECIPE_OF}
    bare = [name for name, env in envs.items() if env.get("SGLANG_ENABLE_MIXED_KV_WINDOWS") == "0"]
    assert bare == ["quarot", "naive"]


def test_every_recipe_has_a_place_in_a_calibration(tmp_path: Path) -> None:
    """The published one where the public release has it."""
    folder = CalibrationFolder(tmp_path)
    assert folder.rotations() == folder.rotations("paper") == tmp_path / "rotations"
    assert folder.rotations("plus") == tmp_path / "rotations_plus"


def test_niah_rows_hold_their_needles_at_the_asked_length(tmp_path: Path) -> None:
    def count(text: str) -> int:
        return len(text.split())

    for index in range(4):
        row = make_row(index, 1000, count, seed=3)
        assert set(row) == {"index", "input", "outputs", "length", "task"}
        assert 800 <= int(str(row["length"])) <= 1000 - 128
        (answer,) = row["outputs"]  # type: ignore[misc]
        text = str(row["input"])
        assert text.count(str(answer)) == 1
        assert text.count("One of the special magic numbers") == (1 if index % 2 == 0 else 4)
    first = write_niah(tmp_path / "a.jsonl", 400, 3, count).read_text()
    assert write_niah(tmp_path / "b.jsonl", 400, 3, count).read_text() == first
    assert len({json.loads(line)["outputs"][0] for line in first.splitlines()}) == 3


def test_ablations_cover_the_papers_tables() -> None:
    variants = {name: make() for name, make in ABLATIONS.items()}
    assert {name: len(rows) for name, rows in variants.items()} == {
        "windows": 5,
        "clip": 26,
        "calibration": 6,
        "rotation": 10,
        "group-size": 3,
    }
    names = [variant.name for rows in variants.values() for variant in rows]
    assert len(set(names)) == len(names)


def test_variants_make_the_servers_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for their dumps: what differs is variables, the group size, or a fit with other options."""
    fits: dict[str, FitOptions] = {}

    def fitted(folder: CalibrationFolder, recipe: str, options: FitOptions, out: Path) -> Path:
        assert (folder, recipe) == (base, "paper")
        fits[out.name] = options
        out.mkdir(parents=True, exist_ok=True)
        for side in "kv":
            (out / f"{side}_rotation_x_y.pt").touch()
        return out

    monkeypatch.setattr(ablations, "run_fit", fitted)
    base, chosen = CalibrationFolder(tmp_path), model_settings("some/model").overridden(group_size=64)
    fitted(base, "paper", FitOptions(), base.rotations("paper"))
    fits.clear()
    rows = {v.name: v for name in ("clip", "rotation", "group-size") for v in ABLATIONS[name]()}
    made = {name: ablations.variant_method(v, chosen, base, None) for name, v in rows.items()}  # type: ignore[arg-type]
    clipped = made["clip_0.92_0.88"].env
    assert (clipped["SGLANG_OSCAR_K_CLIP_RATIO"], clipped["SGLANG_OSCAR_V_CLIP_RATIO"]) == ("0.92", "0.88")
    assert not {"SGLANG_OSCAR_K_CLIP_RATIO", "SGLANG_OSCAR_V_CLIP_RATIO"} & set(made["clip_fitted"].env)
    assert (made["group_32"].group_size, made["rotation_r_h"].group_size) == (32, 64)
    assert fits["rotation_r_h"] == FitOptions(composition="r_h", group_size=64)
    assert fits["rotation_ktk_vtv"] == FitOptions(key_target="ktk", value_target="vtv", group_size=64)
    assert fits["clip_fitted"] == FitOptions(fit_clip=True, group_size=64)
    assert not {"rotation_hadamard", "rotation_none", "clip_0.92_0.88", "group_32"} & set(fits)
    assert made["rotation_r_h"].env["SGLANG_OSCAR_K_ROTATION_PATH"].endswith("ablations/rotation_r_h/k_rotation_x_y.pt")
    assert made["rotation_hadamard"].env["SGLANG_OSCAR_K_ROTATION_PATH"] == "hadamard"
    base.dump.mkdir()
    for age, again in ((-60, []), (60, ["rotation_r_h"])):  # seconds by which the dump is younger than the fits
        when = next(base.rotations("paper").iterdir()).stat().st_mtime + age
        os.utime(base.dump, (when, when))
        fits.clear()
        for name in ("rotation_r_h", "clip_0.92_0.88"):
            ablations.variant_method(rows[name], chosen, base, None)  # type: ignore[arg-type]
        assert [*fits] == again


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["eval", "m", "--benchmarks", "gsm8k"], "not one of paper, niah, gpqa"),
        (["eval", "m", "--data", "gsm8k=x"], "not a benchmark"),
        (["ablation", "weather", "m"], "not one of windows, clip"),
        (["ablation", "clip", "m", "--only", "x"], "not one of clip_0.88_0.88"),
        (["dump", "m", "--server-args", "--x '{"], "No closing quotation"),
        (["rotate", "m", "--clip", "x"], "neither none nor fit"),
        (["rotate", "m", "--recipe", "x"], "not one of plus, focus, paper"),
        (["rotate", "m", "--bits", "x"], "a mean such as 2.5, or widths"),
        (["rotate", "qwen3-8B", "--recipe", "paper", "--bits", "k3v2"], "--bits: has no meaning for --recipe paper"),
        (["rotate", "m", "--bits", "k3v2", "--text", __file__], "--text: has no meaning without a mean of --bits"),
        (["rotate", "m", "--bits", "3.0", "--text", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (
            ["rotate", "m", "--recipe", "paper", "--text", __file__],
            "--text: has no meaning for --recipe paper",
        ),
        (
            ["rotate", "m", "--method", "ktk_vtv"],
            "--method: has no meaning for --recipe focus; --recipe paper takes it",
        ),
        (["rotate", "qwen3-8B", "--clip", "fit"], "--clip: has no meaning for --recipe focus"),
        (["dump", "m", "--dataset-path", "MMMLU=x"], "not one of GPQA, MMLU, WikiText"),
    ],
)
def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], fault: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert fault in " ".join(result.stderr.replace("│", " ").split())


def test_calibrate_hands_text_to_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By option and by variable; without it there is none, and a file of something else is one line."""
    fits: list[FitOptions] = []
    monkeypatch.setattr(
        commands, "run_fit", lambda folder, recipe, options, device: fits.append(options) or folder.path
    )
    text, broken = tmp_path / "text.jsonl", tmp_path / "broken.jsonl"
    text.write_text('{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', encoding="utf-8")
    broken.write_text('{"txt": "a"}\n', encoding="utf-8")
    command = ["rotate", "m", "--dump-dir", str(tmp_path / "qkv_dumps"), "--bits", "3.0"]
    for more, env in (([], {}), (["--text", str(text)], {}), ([], {"BITS_TEXT": str(text)})):
        result = CliRunner().invoke(app, [*command, *more], env=env)
        assert result.exit_code == 0, result.output
    assert [fit.text for fit in fits] == [None, *[("a", [{"role": "user", "content": "b"}])] * 2]
    assert all(fit.bits is not None and fit.bits.mean == 3.0 for fit in fits)
    result = CliRunner().invoke(app, [*command, "--text", str(broken)])
    assert result.exit_code == 1
    assert result.stderr == f"error: {broken}:1: a line needs 'text' or 'messages'\n"


def test_errors_are_one_line(tmp_path: Path) -> None:
    root = ["--root", str(tmp_path)]
    for arguments, fault in (
        (["rotate", "m", *root], "no complete dump"),
        (["eval", "m", "--methods", "bf17", *root], "method must be one of"),
        (["eval", "m", "--methods", "oscar", "--rot-dir", str(tmp_path), *root], "holds no k_rotation"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1, result.output
        assert fault in result.stderr
        assert result.stderr.count("\n") == 1


def test_every_benchmark_is_whole() -> None:
    for name, benchmark in BENCHMARKS.items():
        assert name == benchmark.name
        assert benchmark.columns
        assert bool(benchmark.hub) != bool(benchmark.context)
