"""Dumps: prompts that the model's context holds, refusals told as they were, and no dump taken for one of another."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.errors import DumpError
from oscar_rotation.fit.texts import read_documents, sequences
from oscar_rotation.model_table import model_settings
from oscar_tools.calibration import dump_driver
from oscar_tools.calibration.data import calibration_chats
from oscar_tools.calibration.dump_driver import DumpTask, longest_prompt, prefill, run_dump
from oscar_tools.calibration.dump_origin import ORIGIN
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.model_files import OVERRIDES
from oscar_tools.calibration.self_calibration import SelfCalibration, calibrate
from oscar_tools.cli import app
from oscar_tools.evaluation.prove.texts import CALIBRATION, Texts
from oscar_tools.local_server import LocalServer, ServerFailedError
from sglang_oscar.rotation_source.cache import Calibration
from sglang_oscar.rotation_source.task import Task
from support.benchmark_data import write_rows
from support.reference import MODEL


class Server:
    """Stands in for servers: writes a manifest, or the file that marks covariances, and sees prompts."""

    def __init__(self) -> None:
        self.started = 0
        self.lengths: list[int] = []

    @contextmanager
    def serve(self, model: str, log: Path, args: list[str], env: dict[str, str], given_up: None) -> Iterator[None]:
        self.started += 1
        dump = Path(env["DUMP_KVCACHE_DIR"])
        assert not (dump / "manifest.json").exists()
        DumpManifest(num_layers=1, q_heads=1, kv_heads=1, head_dim=32).write(dump)
        if env["DUMP_KVCACHE_MODE"] == "covariances":
            (dump / "covariances.tp0of1.safetensors").touch()
        yield None

    def prefill(self, server: None, ids: list[int], what: str) -> None:
        self.lengths.append(len(ids))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(dump_driver, "serve", made.serve)
    monkeypatch.setattr(dump_driver, "prefill", made.prefill)
    return made


def checkpoint(folder: Path, weights: bytes = b"weights", context: int = 8192) -> Path:
    """The reference model's tokenizer and configuration, with a few bytes for weights."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def texts(path: Path, word: str, words: int = 200) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_rows(path, [{"text": f"{word} {number} " * words} for number in range(4)])


def request(tmp_path: Path, model: Path, data: Path, **more: Any) -> DumpTask:
    return DumpTask(model_settings(str(model)), tmp_path / "rotation", str(data), **({"tokens": 800} | more))


@pytest.mark.parametrize(
    ("context", "flags", "longest"),
    [
        (8192, (), 8176),
        (2048, (), 2032),
        (32768, (), 8192),
        (8192, ("--context-length", "1024"), 1008),
        (8192, ("--page-size", "64", "--context-length=512"), 496),
        (8192, ("--context-length", "16384"), 8176),
        (512, (OVERRIDES, '{"max_position_embeddings": 2048}'), 2032),
    ],
)
def test_prompts_fit_into_the_context(
    tmp_path: Path, server: Server, context: int, flags: tuple[str, ...], longest: int
) -> None:
    model = checkpoint(tmp_path / "model", context=context)
    asked = request(tmp_path, model, texts(tmp_path / "long.jsonl", "word", 9000), tokens=20000, server_args=flags)
    assert longest_prompt(asked) == longest
    run_dump(asked)
    assert max(server.lengths) == longest
    assert sum(server.lengths) == min(20000, 4 * longest)


def test_a_conversation_that_the_template_does_not_take_is_one_line(tmp_path: Path, server: Server) -> None:
    """Some models have no system role; the record says which conversation it was."""
    model = checkpoint(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    user, system = ({"role": role, "content": "word " * 50} for role in ("user", "system"))
    data = write_rows(tmp_path / "sys.jsonl", [{"messages": [user]}, {"messages": [system, user]}])
    said = "the model's chat template does not take a conversation of system, user (System role not supported)"
    arguments = ["dump", str(model), "--dataset", str(data), "--root", str(tmp_path / "rotation")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (1, f"error: prompt 2: {said}\n")
    assert not server.started
    with pytest.raises(DataError, match=re.escape(f"sys.jsonl: document 2: {said}")):
        Texts(AutoTokenizer.from_pretrained(model), data).documents(CALIBRATION)
    with pytest.raises(DumpError, match=re.escape("document 2: the model's chat template does not take it (System")):
        sequences(read_documents(data), model)


def test_a_server_that_starts_is_given_up_where_there_are_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are chosen beside its start; the error is theirs, and nothing stays."""
    waited = []

    @contextmanager
    def serve(model: str, log: Path, args: list[str], env: dict[str, str], given_up: threading.Event) -> Iterator[None]:
        waited.append(given_up.wait(60))
        raise ServerFailedError("given up")
        yield

    monkeypatch.setattr(dump_driver, "serve", serve)
    model = checkpoint(tmp_path / "model")
    wanted = Calibration(weights="", model="", rope=None, context=8192, group_size=32)
    task = Task(str(model), str(tmp_path / "nowhere"), str(model), False, 0, False, 1, [], wanted)
    with pytest.raises(DataError, match="nowhere"):
        calibrate(SelfCalibration(task), tmp_path)
    assert waited == [True]
    assert not (tmp_path / "recording").exists()


def test_a_context_without_room_for_a_prompt(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    with pytest.raises(DataError, match="a context of 16 tokens has no room"):
        longest_prompt(request(tmp_path, model, tmp_path / "x.jsonl", server_args=("--context-length", "16")))


def test_a_refused_prompt_is_told_as_the_server_told_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = checkpoint(tmp_path / "model"), texts(tmp_path / "mine.jsonl", "word")
    monkeypatch.setattr(dump_driver, "serve", lambda model, log, args, env, given_up: serving(log))

    def refuse(asked: urllib.request.Request, timeout: float) -> None:
        body = json.dumps({"error": {"message": "The input is longer\nthan it may be."}}).encode()
        raise urllib.error.HTTPError(asked.full_url, 400, "Bad Request", Message(), io.BytesIO(body))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    command = ["dump", str(model), "--root", str(tmp_path / "rotation"), "--dataset", str(data), "--tokens", "50"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    assert done.stderr.splitlines()[-1].startswith(
        "error: the server refused prompt 1 of 1, 50 tokens, with status 400: The input is longer (log: "
    )
    assert "dump_server.log)" in done.stderr


@contextmanager
def serving(log: Path) -> Iterator[LocalServer]:
    """A server that nobody reaches."""
    yield LocalServer("http://127.0.0.1:1", log, None)  # type: ignore[arg-type]


def test_a_server_that_hangs_up_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.recv(65536)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ServerFailedError) as caught:
            prefill(LocalServer(url, tmp_path / "dump_server.log", None), [1, 2], "prompt 3 of 4")  # type: ignore[arg-type]
        thread.join()
    assert str(caught.value).startswith("the server did not answer to prompt 3 of 4, 2 tokens (")
    assert str(caught.value).endswith(f"its log says why: {tmp_path / 'dump_server.log'}")


def test_the_same_dump_is_reused(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = checkpoint(tmp_path / "run1/model"), texts(tmp_path / "a/mine.jsonl", "alpha")
    first = run_dump(request(tmp_path, model, data))
    copies = checkpoint(tmp_path / "run2/model"), Path(shutil.copy(data, tmp_path / "mine.jsonl"))
    assert run_dump(request(tmp_path, *copies)) == first
    assert server.started == 1
    assert "note:" not in capsys.readouterr().out
    # A dump of an older release says nothing of its origin, but shows its mode.
    (first.dump / ORIGIN).unlink()
    assert run_dump(request(tmp_path, model, data)) == first
    assert "note: " in (said := capsys.readouterr().out)
    assert "does not say of which prompts and weights it was made" in said
    with pytest.raises(DumpError, match="holds activations, covariances are asked for"):
        run_dump(request(tmp_path, model, data, covariances=True))


def test_a_dump_that_is_being_made_is_left_alone(tmp_path: Path, server: Server) -> None:
    """Unfinished files of a running dump look like those of an interrupted one."""
    model, data = checkpoint(tmp_path / "model"), texts(tmp_path / "a/mine.jsonl", "alpha")
    folder = run_dump(request(tmp_path, model, data))
    with dump_driver.alone_in(folder.dump), pytest.raises(DumpError, match="another process is making this dump"):
        run_dump(request(tmp_path, model, data))
    assert run_dump(request(tmp_path, model, data)) == folder
    assert server.started == 1


def test_a_dump_of_a_newer_release_is_not_removed(tmp_path: Path, server: Server) -> None:
    model, data = checkpoint(tmp_path / "model"), texts(tmp_path / "a/mine.jsonl", "alpha")
    folder = run_dump(request(tmp_path, model, data))
    manifest = folder.dump / "manifest.json"
    newer = manifest.read_text().replace('"format_version": 1', '"format_version": 2')
    manifest.write_text(newer)
    with pytest.raises(DumpError, match=r"format_version is 2, this release reads 1; update sglang-oscar"):
        run_dump(request(tmp_path, model, data))
    assert manifest.read_text() == newer


def test_what_an_older_dump_does_not_say_contradicts_nothing(tmp_path: Path, server: Server) -> None:
    model, data = checkpoint(tmp_path / "model"), texts(tmp_path / "a/mine.jsonl", "alpha")
    folder = run_dump(request(tmp_path, model, data))
    origin = json.loads((folder.dump / ORIGIN).read_text())
    del origin["model"]["tokenizer"]
    (folder.dump / ORIGIN).write_text(json.dumps(origin | {"model": origin["model"] | {"commit": None}}))
    assert run_dump(request(tmp_path, model, data)) == folder
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(DumpError, match="another configuration of the model"):
        run_dump(request(tmp_path, model, data))


def test_a_dump_of_something_else_is_refused(tmp_path: Path, server: Server) -> None:
    model, data = checkpoint(tmp_path / "run1/model"), texts(tmp_path / "a/mine.jsonl", "alpha")
    folder = run_dump(request(tmp_path, model, data))
    trained = checkpoint(tmp_path / "run2/model", weights=b"trained")
    stretched = checkpoint(tmp_path / "run3/model", context=4096)
    other = texts(tmp_path / "b/mine.jsonl", "beta")
    for asked, what in (
        (request(tmp_path, trained, data), "was made of other weights or another configuration of the model"),
        (request(tmp_path, stretched, data), "was made of other weights or another configuration of the model"),
        (request(tmp_path, model, other), "was made of other prompts"),
        (request(tmp_path, model, data, covariances=True), "holds activations, covariances are asked for"),
        (
            request(tmp_path, model, data, server_args=(OVERRIDES, '{"rope_theta": 5e6}')),
            f"made under other {OVERRIDES}",
        ),
    ):
        with pytest.raises(DumpError, match=what) as caught:
            run_dump(asked)
        assert str(folder.dump) in str(caught.value)
        assert str(caught.value).endswith("remove it, or name another OSCAR_ROOT for the new one")
    (folder.dump / ORIGIN).write_text("[1]")
    with pytest.raises(DumpError, match=r"origin\.json: is broken"):
        run_dump(request(tmp_path, model, data))
    assert server.started == 1
    shutil.rmtree(folder.dump)
    assert run_dump(request(tmp_path, model, other, covariances=True)) == CalibrationFolder(folder.path)
    assert server.started == 2


def test_text_may_hold_any_character(tmp_path: Path) -> None:
    """A line of JSON ends at a line feed only; \\r\\n is one, too."""
    rows = [{"text": "first\u2028second\u2029third\x85fourth"}, {"text": "next"}]
    path = tmp_path / "mine.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert list(calibration_chats(str(path))) == [row["text"] for row in rows]
