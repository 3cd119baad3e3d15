"""Conversion without loss; the zoo through the hub's own client against a hub of this machine, then offline."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.files.zoo import get_rotations, list_zoo, zoo_repo

runner = CliRunner()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The parts of the hub's protocol that listing and downloading use, for one repository."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files = files
        self.downloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if re.fullmatch(rf"/api/models/some/zoo(/revision/(main|{COMMIT}))?", self.path.split("?")[0]):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer(200, json.dumps({"id": "some/zoo", "sha": COMMIT, "siblings": siblings}).encode())
            return
        found = re.fullmatch(rf"/some/zoo/resolve/(main|{COMMIT})/(.+)", self.path)
        if found and found[2] in self.server.files:
            body = self.server.files[found[2]]
            if self.command == "GET":
                self.server.downloads.append(found[2])
            self.answer(200, body, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT})
            return
        known_repo = "/some/zoo" in self.path
        known_revision = re.search(rf"/(resolve|revision)/(main|{COMMIT})", self.path)
        fault = "RepoNotFound" if not known_repo else "EntryNotFound" if known_revision else "RevisionNotFound"
        self.answer(404, b"{}", {"X-Error-Code": fault})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, rotation_set: RotationSet) -> Iterator[Hub]:
    path = tmp_path / "k.pt"
    save_rotation_file(path, rotation_set)
    files = {
        "README.md": b"a zoo",
        "Qwen3-8B/k_rotation_qqt_r_h_pbr.pt": path.read_bytes(),
        "Qwen3-8B/v_rotation_sst_r_h_pbr.pt": path.read_bytes()[:500],
    }
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()


def test_a_zoo_is_listed_at_a_commit(hub: Hub) -> None:
    listing = list_zoo("some/zoo", endpoint=hub.url)
    assert listing.commit == COMMIT
    assert listing.folders == {"Qwen3-8B": ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"]}
    for repo, revision, fault in (("other/zoo", None, "no such repository"), ("some/zoo", "v9", "no revision v9")):
        with pytest.raises(RotationFileError, match=fault):
            list_zoo(repo, revision, endpoint=hub.url)


def test_a_pinned_file_comes_from_the_cache_the_second_time(
    hub: Hub, tmp_path: Path, rotation_set: RotationSet
) -> None:
    name = "Qwen3-8B/k_rotation_qqt_r_h_pbr.pt"
    cache = tmp_path / "cache"
    for _ in range(2):
        (path,) = get_rotations("some/zoo", [name], COMMIT, endpoint=hub.url, cache_dir=cache)
        assert torch.equal(read_rotation_file(path).rotations, rotation_set.rotations)
    assert hub.downloads == [name]
    hub.shutdown()
    (offline,) = get_rotations("some/zoo", [name], COMMIT, offline=True, endpoint=hub.url, cache_dir=cache)
    assert offline == path
    with pytest.raises(RotationFileError, match="not in the cache"):
        get_rotations("some/zoo", ["x.pt"], COMMIT, offline=True, endpoint=hub.url, cache_dir=cache)


@pytest.mark.parametrize(
    ("path", "revision", "fault"),
    [
        ("Qwen3-8B/v_rotation_sst_r_h_pbr.pt", COMMIT, "not a readable torch file"),
        ("Qwen3-8B/none.pt", COMMIT, "no such file"),
        ("Qwen3-8B/k_rotation_qqt_r_h_pbr.pt", "v9", "no revision v9"),
        ("../k.pt", COMMIT, r"\.\./k\.pt"),
    ],
)
def test_what_cannot_be_used_is_said(hub: Hub, tmp_path: Path, path: str, revision: str, fault: str) -> None:
    with pytest.raises(RotationFileError, match=fault):
        get_rotations("some/zoo", [path], revision, endpoint=hub.url, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("repo", ["foo bar", "a/b/c"])
def test_names_that_no_repository_has(repo: str) -> None:
    for command in (["zoo", "list"], ["zoo", "get", "x.pt", "--offline"]):
        result = runner.invoke(app, [*command, "--repo", repo])
        assert result.exit_code == 1
        assert repo in result.stderr


def test_a_zoo_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSCAR_ZOO_REPO", raising=False)
    result = runner.invoke(app, ["zoo", "list"])
    assert result.exit_code == 1
    assert "name its hub repository with --repo or OSCAR_ZOO_REPO" in result.stderr
    monkeypatch.setenv("OSCAR_ZOO_REPO", "some/zoo")
    assert zoo_repo(None) == "some/zoo"


def oscar(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user of that hub with an own cache."""
    paths = os.pathsep.join(path for path in sys.path if path)
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "OSCAR_ZOO_REPO": "some/zoo", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "oscar_rotation", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)


def test_zoo_commands_online_and_offline(hub: Hub, tmp_path: Path, rotation_set: RotationSet) -> None:
    home, name = tmp_path / "home", "Qwen3-8B/k_rotation_qqt_r_h_pbr.pt"
    listed = oscar(hub, home, "zoo", "list")
    assert listed.returncode == 0, listed.stderr
    assert COMMIT in listed.stdout
    assert "Qwen3-8B" in listed.stdout
    fetched = oscar(hub, home, "zoo", "get", name, "--revision", COMMIT, "--out", str(tmp_path / "here"))
    assert fetched.returncode == 0, fetched.stderr
    place = tmp_path / "here" / Path(name).name
    assert fetched.stdout.strip() == str(place)
    assert torch.equal(read_rotation_file(place).rotations, rotation_set.rotations)
    twice = runner.invoke(app, ["zoo", "get", name, name.replace("8B", "4B"), "--out", str(tmp_path / "here")])
    assert twice.exit_code == 2
    assert "several files are named" in twice.stderr
    hub.shutdown()
    hub.server_close()
    again = oscar(hub, home, "zoo", "get", name, "--revision", COMMIT, "--offline")
    assert again.returncode == 0, again.stderr
    cached = Path(again.stdout.strip())
    assert cached.is_relative_to(home)
    assert COMMIT in cached.parts
    other = oscar(hub, home, "zoo", "get", "Qwen3-8B/none.pt", "--revision", COMMIT, "--offline")
    assert other.returncode == 1
    assert "not in the cache and the hub is not reached" in other.stderr
    assert other.stderr.count("\n") == 1
    gone = oscar(hub, home, "zoo", "list")
    assert gone.returncode == 1
    assert "the hub cannot be reached" in gone.stderr


def test_conversion_keeps_everything(tmp_path: Path, rotation_set: RotationSet) -> None:
    first, second, third = (tmp_path / name for name in ("k.pt", "k.safetensors", "back.pt"))
    save_rotation_file(first, rotation_set)
    for source, target in ((first, second), (second, third)):
        result = runner.invoke(app, ["convert", str(source), str(target)])
        assert result.exit_code == 0, result.output
    for path in (second, third):
        back = read_rotation_file(path)
        assert torch.equal(back.rotations, rotation_set.rotations)
        assert rotation_set.eigenvalues is not None
        assert back.eigenvalues is not None
        assert torch.equal(back.eigenvalues, rotation_set.eigenvalues)
        assert (back.clip_ratios, back.metadata) == (rotation_set.clip_ratios, rotation_set.metadata)


@pytest.mark.parametrize("name", ["org/\tmodel", "two\nlines", "x" * 5000])
def test_what_no_file_may_state_is_not_written(name: str, tmp_path: Path, rotation_set: RotationSet) -> None:
    path = tmp_path / "k.pt"
    save_rotation_file(path, rotation_set)
    before = path.read_bytes()
    result = runner.invoke(app, ["convert", str(path), str(path), "--model-id", name])
    assert result.exit_code == 1
    assert "model_id is not a line" in result.stderr
    assert path.read_bytes() == before


def test_conversion_of_a_public_file_records_what_its_name_says(tmp_path: Path, rotation_set: RotationSet) -> None:
    layers = {str(i): {"layer_id": i, "rotation": r.clone()} for i, r in enumerate(rotation_set.rotations)}
    content = {"format_version": 1, "objective": "qqt", "source_grouping": "layer", "layers": layers}
    source, target = tmp_path / "v_rotation_qqt_r_h_pbr.pt", tmp_path / "v.safetensors"
    torch.save(content, source)
    assert runner.invoke(app, ["convert", str(source), str(target), "--model-id", "a/b"]).exit_code == 0
    metadata = read_rotation_file(target).metadata
    assert (metadata.side, metadata.model_id) == ("v", "a/b")
    failed = runner.invoke(app, ["convert", str(tmp_path / "none.pt"), str(target)])
    assert failed.exit_code == 1
    assert "no such file" in failed.stderr
