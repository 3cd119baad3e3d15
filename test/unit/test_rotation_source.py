"""Where a server's rotations come from: the order, the cache, and calibration in a child process."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import recipe_rotation
from oscar_tools.calibration.calibrate_command import server_arguments
from oscar_tools.doctor.model import model_checks, model_config
from sglang_oscar.errors import Int2Error
from sglang_oscar.names import CHOSEN_ROTATIONS
from sglang_oscar.rotation_source import cache, choice, on_the_spot, places
from sglang_oscar.rotation_source.choice import Missing, Source
from sglang_oscar.rotation_source.flags import recording_flags
from sglang_oscar.settings import Settings
from support.reference import MODEL

FIT = """
import shutil, sys
from sglang_oscar.rotation_source.task import Task
print("fitted for", Task.decode(sys.stdin.buffer.read()).wanted.context, flush=True)
for side in "kv":
    shutil.copy("{files}/%s_rotation_a.pt" % side, sys.argv[1])
open("{files}/calls", "a").write("x")
"""
"""Stands in for the package that calibrates."""


def rotations(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("k", "v"):
        content = recipe_rotation("hadamard", num_layers=4, head_dim=128, side=side)  # type: ignore[arg-type]
        save_rotation_file(folder / f"{side}_rotation_a.pt", content)
    return folder


def settings(root: Path, **env: str) -> Settings:
    return Settings.from_env({"SGLANG_OSCAR_CACHE": str(root / "cache"), **env})


@pytest.fixture(scope="module")
def model() -> Any:
    return model_config(str(MODEL))


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """A copy of the reference model that a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(MODEL / name, copy)
    given = {"model_path": str(copy), "nnodes": 1, "trust_remote_code": False, "base_gpu_id": 0}
    left_out = ("revision", "download_dir", "kv_cache_quant_group_size", "tokenizer_path")
    return Namespace(**given, **dict.fromkeys(left_out))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in place of the package that calibrates; its source may be written anew."""
    files = rotations(tmp_path / "made")
    (tmp_path / "stand_in_tools.py").write_text(FIT.format(files=files))
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setattr(on_the_spot, "TOOLS", "stand_in_tools")
    return tmp_path / "stand_in_tools.py"


def test_the_order(tmp_path: Path, args: Namespace, model: Any) -> None:
    """Variables before the checkpoint, the checkpoint before the cache, and one line says which."""
    missing = choice.find(args, settings(tmp_path), model)
    assert isinstance(missing, Missing)
    rotations(missing.folder)
    found = choice.find(args, settings(tmp_path), model)
    assert isinstance(found, Source)
    assert found.line() == (
        f"rotations from the cache: {missing.folder}/k_rotation_a.pt, {missing.folder}/v_rotation_a.pt"
    )
    beside = rotations(Path(args.model_path) / "oscar")
    found = choice.find(args, settings(tmp_path), model)
    assert found == Source(f"{beside}/k_rotation_a.pt", f"{beside}/v_rotation_a.pt", "the checkpoint")
    own = rotations(tmp_path / "own")
    found = choice.find(args, settings(tmp_path, SGLANG_OSCAR_ROTATIONS=str(own)), model)
    assert found == Source(f"{own}/k_rotation_a.pt", f"{own}/v_rotation_a.pt", "SGLANG_OSCAR_ROTATIONS")
    both = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": "hadamard" for side in "KV"}
    found = choice.find(args, settings(tmp_path, **both), model)
    assert isinstance(found, Source)
    assert found.line().endswith("SGLANG_OSCAR_V_ROTATION_PATH: hadamard")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard"}, "SGLANG_OSCAR_V_ROTATION_PATH is not set"),
        (
            {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_ROTATIONS": "hadamard"},
            "are both set; unset one",
        ),
        ({"SGLANG_OSCAR_ROTATIONS": "/nonexistent"}, "/nonexistent is no folder"),
        ({"SGLANG_OSCAR_ROTATIONS": "nonsense"}, "nonsense is no folder"),
        ({"SGLANG_OSCAR_ROTATIONS": str(MODEL)}, "holds no k_rotation_"),
    ],
)
def test_variables_that_do_not_do(env: dict[str, str], said: str) -> None:
    with pytest.raises(Int2Error, match=said):
        choice.of_variables(Settings.from_env(env))


def test_a_repository_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder of rotations is meant without being named; of several it has to be."""
    monkeypatch.setattr(places, "download", lambda repository, patterns: tmp_path)
    rotations(tmp_path / "a")
    assert places.named("owner/zoo")[0] == str(tmp_path / "a" / "k_rotation_a.pt")
    rotations(tmp_path / "b")
    with pytest.raises(Int2Error, match="in 2 folders; name one: owner/zoo/a, owner/zoo/b"):
        places.named("owner/zoo")
    assert places.named("owner/zoo/b")[1] == str(tmp_path / "b" / "v_rotation_a.pt")


def test_the_cache_knows_weights_by_what_they_hold(tmp_path: Path, args: Namespace, model: Any) -> None:
    """A copy elsewhere is the same; other weights, another context, group size or recipe are not."""

    def folder(args: Namespace, **env: str) -> Path:
        found = choice.find(args, settings(tmp_path, **env), model)
        assert isinstance(found, Missing)
        return found.folder

    first = folder(args)
    assert folder(Namespace(**vars(args) | {"model_path": str(MODEL)})) == first
    assert folder(Namespace(**vars(args) | {"kv_cache_quant_group_size": 64})) != first
    assert folder(args, SGLANG_OSCAR_RECIPE="plus") != first
    assert folder(args, SGLANG_OSCAR_K_BITS="3") == first
    assert folder(args, SGLANG_OSCAR_K_BITS="4") != first
    weights = Path(args.model_path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 3 :] = bytes(reversed(content[len(content) // 3 :]))
    other = Path(args.model_path).with_name("trained-further")
    other.mkdir()
    (other / "model.safetensors").write_bytes(content)
    assert folder(Namespace(**vars(args) | {"model_path": str(other)})) != first


def test_calibration_on_the_spot_happens_once(
    tmp_path: Path, args: Namespace, model: Any, tools: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of servers that start together one calibrates; the log says what happens, workers are told the files."""
    caplog.set_level(logging.INFO)
    tools.write_text("import time; time.sleep(0.5)" + tools.read_text())
    chosen: list[Settings] = []
    servers = [Namespace(**vars(args)) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda one=one: chosen.append(choice.choose(one, settings(tmp_path), model, [])))
        for one in servers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "made" / "calls").read_text() == "x"
    assert chosen[0].model_dump() == chosen[1].model_dump()
    origins = {vars(one)[CHOSEN_ROTATIONS]["origin"] for one in servers}
    assert origins == {"calibration on the spot", "the cache"}
    assert vars(servers[0])[CHOSEN_ROTATIONS]["keys"] == chosen[0].k_rotation
    done = f"int2 calibration: fitted for {model.context_len}\n"
    for said in ("making them now, once", "waiting for", done, "rotations from the cache: "):
        assert said in caplog.text
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == [
        Path(str(chosen[0].k_rotation)).parent.name
    ]


def test_who_is_asked_to_calibrate_needs_no_sglang() -> None:
    """Its import takes as long as all else before the recording server starts."""
    program = "import sys, oscar_tools.calibration.on_request; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("program", "env", "said"),
    [
        ("import sys; sys.exit('error: no GPU has room')", {}, "failed: no GPU has room"),
        (
            "import sys; sys.exit('error: the server ended; end of x.log:\\nRuntimeError: no room\\nbye')",
            {},
            "failed: the server ended: RuntimeError: no room",
        ),
        ("import time; time.sleep(60)", {"SGLANG_OSCAR_CALIBRATE_SECONDS": "0.3"}, "took longer than 0 s"),
    ],
)
def test_a_failed_calibration_leaves_a_log(
    program: str, env: dict[str, str], said: str, tmp_path: Path, args: Namespace, model: Any, tools: Path
) -> None:
    tools.write_text(program)
    with pytest.raises(Int2Error, match=said) as caught:
        choice.choose(args, settings(tmp_path, **env), model, [])
    assert "\n" not in str(caught.value)
    (left,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")
    assert left.suffix == ".log"
    assert str(left) in str(caught.value)


def test_what_is_not_calibrated(
    tmp_path: Path, args: Namespace, model: Any, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Int2Error, match=r"SGLANG_OSCAR_CALIBRATE=0 forbids.*oscar calibrate"):
        choice.choose(args, settings(tmp_path, SGLANG_OSCAR_CALIBRATE="0"), model, [])
    several = Namespace(**vars(args) | {"nnodes": 2})
    with pytest.raises(Int2Error, match="a server of several nodes does not calibrate"):
        choice.choose(several, settings(tmp_path), model, [])
    (tmp_path / "file").touch()
    unwritable = Settings.from_env({"SGLANG_OSCAR_CACHE": str(tmp_path / "file" / "cache")})
    with pytest.raises(Int2Error, match=r"cannot be written .*; set SGLANG_OSCAR_CACHE"):
        choice.choose(args, unwritable, model, [])
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(Int2Error, match=r"no home folder .*; set SGLANG_OSCAR_CACHE"):
        choice.choose(args, Settings.from_env({}), model, [])
    (tmp_path / "empty").mkdir()
    without = Namespace(**vars(args) | {"model_path": str(tmp_path / "empty")})
    with pytest.raises(Int2Error, match="holds no files of weights"):
        choice.choose(without, settings(tmp_path), model, [])
    assert not (tmp_path / "cache").exists()


def test_a_lock_that_stays(tmp_path: Path) -> None:
    """A server does not wait for ever."""
    said: list[str] = []
    begin = time.monotonic()
    with cache.alone(tmp_path / "key", 300, said.append):
        with pytest.raises(Int2Error, match="has been calibrating"), cache.alone(tmp_path / "key", 0.1, said.append):
            pass
    assert time.monotonic() - begin < 300
    assert len(said) == 1


def test_a_folder_is_filled_as_a_whole(tmp_path: Path) -> None:
    """What was there stays until the new one is complete."""
    folder = rotations(tmp_path / "key")
    (tmp_path / "..key.ab.new.cd.new" / "recording").mkdir(parents=True)  # of a process that was killed

    def break_off() -> None:
        with cache.filling(folder) as new:
            (new / "half").touch()
            raise ValueError("broke off")

    with pytest.raises(ValueError, match="broke off"):
        break_off()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["k_rotation_a.pt", "key", "v_rotation_a.pt"]
    with cache.filling(folder) as new:
        (new / "whole").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["key", "whole"]


def test_flags_of_the_recording_server() -> None:
    """How the model is loaded and computed is kept, how requests are served is not."""
    kept = ["--tp-size", "2", "--trust-remote-code", "--context-length", "4096", "--quantization", "fp8"]
    kept += ["--json-model-override-args", '{"rope_theta": 5}', "--mem-fraction-static", "0.5", "--base-gpu-id", "1"]
    dropped = ["--port", "1234", "--speculative-algorithm", "NGRAM", "--enable-hierarchical-cache", "--dp-size", "2"]
    dropped += ["--disaggregation-mode", "prefill", "--api-key", "secret", "--chunked-prefill-size", "512"]
    args = server_arguments("a/model", [*kept, *dropped])
    flags = recording_flags(args)
    again = server_arguments("a/model", flags)
    assert recording_flags(again) == flags
    for name in ("tp_size", "trust_remote_code", "context_length", "quantization", "json_model_override_args"):
        assert getattr(again, name) == getattr(args, name)
    assert (again.mem_fraction_static, again.base_gpu_id) == (0.5, 1)
    assert (again.speculative_algorithm, again.enable_hierarchical_cache, again.dp_size) == (None, False, 1)
    assert not {"--port", "--api-key", "--disaggregation-mode", "--chunked-prefill-size"} & set(flags)


def test_random_weights_are_not_recorded() -> None:
    """A server that begins with them, as trainers' do, gets the checkpoint's rotations, and keeps no others by them."""
    assert recording_flags(server_arguments("a/model", ["--load-format", "dummy"])) == []
    assert recording_flags(server_arguments("a/model", ["--load-format", "pt"])) == ["--load-format", "pt"]


def test_doctor_says_it_beforehand(tmp_path: Path, args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for side in "KV":
        monkeypatch.delenv(f"SGLANG_OSCAR_{side}_ROTATION_PATH", raising=False)
    monkeypatch.setenv("SGLANG_OSCAR_CACHE", str(tmp_path / "cache"))

    def said() -> tuple[bool, str]:
        (check,) = (one for one in model_checks(args.model_path, None, 8 << 30) if one.name == "rotations")
        return check.ok, check.line()

    ok, line = said()
    assert ok
    assert "none yet: the first server calibrates on the spot" in line
    monkeypatch.setenv("SGLANG_OSCAR_CALIBRATE", "0")
    ok, line = said()
    assert not ok
    assert "oscar calibrate" in line
    rotations(Path(args.model_path) / "oscar")
    ok, line = said()
    assert ok
    assert "from the checkpoint: keys " in line


def test_what_a_calibration_says_of_itself() -> None:
    """Its facts are JSON values, and a change of any is another key."""
    one = cache.Calibration("w", "m", {"rope_theta": 1e4}, 8192, 128)
    assert json.loads(json.dumps(vars(one)))["context"] == 8192
    assert one.key != cache.Calibration("w", "m", {"rope_theta": 1e4}, 4096, 128).key
