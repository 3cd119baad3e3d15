"""The server that waits for chunks does so by a plugin of SGLang that is made for it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "serving"))

from bench_chunks import waiting

from sglang_oscar.requests import nan


def test_a_plugin_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = waiting(tmp_path)
    assert mode.env["PYTHONPATH"].startswith(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nan, "has_newest_only", lambda tree_cache: False)
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="waits")
    found.load()()
    assert nan.has_newest_only(None)
