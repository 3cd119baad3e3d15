"""Models are told apart by samples of their weights."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from oscar_tools.calibration.weight_files import file_digest, model_files


def test_weights_of_one_size_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(64))
    first = model_files(str(tmp_path))
    assert first["name"] == tmp_path.name
    assert first == model_files(str(tmp_path))
    weights.write_bytes(bytes(63) + b"\1")
    assert model_files(str(tmp_path)) != first
    assert model_files("some/model") == {"name": "some/model", "commit": None}


def test_a_tokenizer_makes_another_model(tmp_path: Path) -> None:
    """Prompts are tokens: another template, or another vocabulary, asks another question."""
    found = []
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
        found.append(model_files(str(tmp_path)))
        (tmp_path / name).write_text("[]")
        found.append(model_files(str(tmp_path)))
    assert all(a != b for a, b in pairwise(found))


def test_an_id_is_known_by_what_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--acme--ref"
    (folder / "refs").mkdir(parents=True)
    for commit in ("1" * 40, "2" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        assert model_files("acme/ref") == {"name": "acme/ref", "commit": commit}


def test_a_file_is_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(1 << 21))
    whole = file_digest(path)
    path.write_bytes(bytes(1_000_000) + b"1" + bytes((1 << 21) - 1_000_001))
    assert file_digest(path) != whole
