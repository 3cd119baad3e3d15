"""A server that measures errors of keys says them, by layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import requests

from sglang_oscar.attention.key_errors import CHUNKS, EVERY
from support.models import COMMON
from support.servers import HADAMARD, STRICT, serve

pytestmark = pytest.mark.server


def test_errors_are_published(qwen3: Path, tmp_path: Path) -> None:
    """2 bits cost every layer something."""
    args = [
        "--kv-cache-dtype",
        "int2",
        "--kv-cache-quant-group-size",
        "64",
        "--skip-tokenizer-init",
        "--enable-metrics",
    ]
    env = HADAMARD | STRICT | {"SGLANG_OSCAR_KEY_ERRORS": "1"}
    with serve(qwen3, tmp_path / "log", *args, env=env) as server:
        for seed in range(EVERY * CHUNKS + 1):
            server.generate([6 + (seed + 1) * n % 200 for n in range(150)], 1)
        text = requests.get(f"{server.url}/metrics", timeout=600).text
        found = {}
        for name in ("key_error", "key_error_growth"):
            values = re.findall(rf'^sglang:oscar_{name}\{{.*layer="(\d+)".*\}} (\S+)$', text, re.MULTILINE)
            found[name] = {int(layer): float(value) for layer, value in values}
        assert found["key_error"].keys() == set(range(COMMON["num_hidden_layers"]))
        assert all(0.01 < value < 1 for value in found["key_error"].values())
        assert set(found["key_error_growth"].values()) == {1.0}
        assert server.alive()
