"""What the files of a worker share: a random model, and the stock server whose answers are the right ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models import save
from support.servers import Server, serve

STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache"]
STOCK += ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
"""Logits in float32: BF16 ones come in steps of 0.0625 between 8 and 16, and a random model has many ties in those."""


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def stock_qwen3(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SGLang without int2 mode, with that model. It is started once, and asked by whoever needs right answers."""
    with serve(qwen3, tmp_path_factory.mktemp("stock") / "log", *STOCK) as server:
        yield server
