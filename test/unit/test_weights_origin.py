"""Which weights storage has pages of: the same for all processes that read the same files, and for no others."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from transformers import Qwen3Config

from sglang_oscar.tiers.salt import model_facts
from sglang_oscar.weights import absorption, origin
from sglang_oscar.weights.origin import weights_origin

MODEL = SimpleNamespace(dtype="bfloat16", hf_text_config=Qwen3Config(num_hidden_layers=2))


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_loaded", {})


def arguments(path: str, **changes: Any) -> SimpleNamespace:
    given = {"model_path": path, "revision": None, "quantization": None, "download_dir": None, "kv_cache_dtype": "int2"}
    return SimpleNamespace(**given | changes)


def checkpoint(folder: Path, content: bytes = b"weights", changed: int = 10**18) -> Path:
    """A folder with a file of weights, all of one time of change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    os.utime(folder / "model.safetensors", ns=(changed, changed))
    (folder / "README.md").touch()
    return folder


def facts(path: str) -> dict[str, Any]:
    """Of a server that starts now."""
    origin._loaded.clear()
    return model_facts(arguments(path), MODEL)


def test_one_relative_path_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for run in ("run1", "run2"):
        checkpoint(tmp_path / run / "model")
        monkeypatch.chdir(tmp_path / run)
        seen.append(facts("model"))
    assert seen[0] != seen[1]


def test_weights_that_are_overwritten_in_place(tmp_path: Path) -> None:
    """By the size of a file or the time of its change; what holds no weights is of no matter."""
    path = str(checkpoint(tmp_path / "model"))
    first = facts(path)
    (tmp_path / "model" / "README.md").write_text("of the model")
    assert facts(path) == first
    checkpoint(tmp_path / "model", changed=10**18 + 1)
    second = facts(path)
    checkpoint(tmp_path / "model", b"more weights")
    assert facts(path) not in (first, second)
    assert second != first


def test_servers_of_one_folder_have_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever folder they run in, and by whatever name they call it."""
    checkpoint(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    assert facts(str(tmp_path / "model")) == facts("model") == facts("link") == facts("./model/")


def test_a_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"12")
    named = weights_origin(str(tmp_path / "m.gguf"), None, None)
    assert named["path"] == str(tmp_path / "m.gguf")
    assert [file[:2] for file in named["files"]] == [["m.gguf", 2]]


def test_a_hub_id_is_the_commit_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of downloads or in the hub's own; a branch is what it points at; unknown where there is neither."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert weights_origin("o/m", None, None) == {"path": "o/m", "commit": None}
    for cache, commit in (("cache", "1" * 40), ("downloads", "2" * 40)):
        folder = tmp_path / cache / "models--o--m"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    assert weights_origin("o/m", None, None)["commit"] == "1" * 40
    assert weights_origin("o/m", "main", str(tmp_path / "downloads"))["commit"] == "2" * 40
    assert weights_origin("o/m", "1" * 40, str(tmp_path / "downloads"))["commit"] == "1" * 40
    assert weights_origin("o/m", "other", None)["commit"] is None


@pytest.mark.parametrize("draft", [False, True])
def test_what_was_loaded_counts(draft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what lies there when storage is attached; and files that change while they are read are not taken for it."""
    args = arguments(str(checkpoint(tmp_path / "model")))
    before = weights_origin(args.model_path, None, None)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)

    def load(*_: Any) -> str:
        checkpoint(tmp_path / "model", b"others")
        return "loaded"

    assert absorption.around_load_model(load, SimpleNamespace(is_draft_worker=draft)) == "loaded"
    assert (model_facts(args, MODEL)["weights"] == before) is not draft
