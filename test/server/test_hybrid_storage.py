"""States of hybrid models in storage: they come back with their windows, and never without; damaged ones are misses.
One of two prompts begins with an image.

Rows, windows and blocks are as in ``test_hybrid_host_tier.py``: whatever is read where it was not filled is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support import hybrid_models, vision_models
from support.api import from_storage, wait_for
from support.compare import LOGPROBS, assert_same
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins
from support.vision_models import IMAGE, Prompt, letters

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--dtype", "float32"]
STOCK = ["--attention-backend", "torch_native", "--disable-radix-cache", "--max-running-requests", "4", *COMMON]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--mamba-track-interval", "64", *COMMON]
TIER = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-mem-layout", "page_first"]
TIER += ["--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "4096", "--hicache-ratio", "4"]
TIER += ["--max-running-requests", "2", "--max-mamba-cache-size", "16"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FROM = "0.5.22"
"""The first release that takes what lies beside states along."""
PAGE, LENGTHS, TOKENS = 64, (560, 700), 24
"""A page ends within both first answers."""
IMAGE_TOKENS = 82
"""Of an image of 320 x 256 pixels, with what stands before and behind it."""
NEAR_TIE = DRIFT = 0.01


@dataclass
class Turn:
    """What a server was asked and answered."""

    prompts: list[Prompt]
    answers: list[dict[str, Any]]


def ask(server: Server, prompts: list[Prompt]) -> Turn:
    return Turn(prompts, [vision_models.ask(server, prompt, TOKENS, **LOGPROBS) for prompt in prompts])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid_models.save("qwen3_5", tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """Two turns with stock SGLang."""
    seen, (of_image, of_text) = vision_models.image(0, 320, 256), LENGTHS
    prompts = [(IMAGE + letters(of_image - IMAGE_TOKENS, seed=29), [seen]), (letters(of_text, seed=30), [])]
    with serve(model, tmp_path_factory.mktemp("stock") / "log", *STOCK, env=FLOAT) as server:
        first = ask(server, prompts)
        texts = [
            text + one["text"] + letters(50, seed=31) for (text, _), one in zip(prompts, first.answers, strict=True)
        ]
        return [first, ask(server, [(text, images) for text, (_, images) in zip(texts, prompts, strict=True)])]


@contextmanager
def server_on(
    folder: Path, model: Path, log: Path, *args: str, version: str = installed(), **variables: str
) -> Iterator[Server]:
    """A server that stores pages in ``folder``."""
    env = HADAMARD | STRICT | FLOAT | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)} | variables
    env = environment(version, **env)
    env = with_plugins(env, "lossless_plugin", "late_host_plugin", "roomy_host_plugin", "no_gpu_plugin")
    with serve(model, log, *INT2, *TIER, *args, env=env) as server:
        yield server


def states(folder: Path) -> list[Path]:
    """Files of states, by SGLang's name of them."""
    return sorted(folder.glob("*.mamba*.bin"))


def write(folder: Path, server: Server, prompts: list[Prompt]) -> Turn:
    """Answers to prompts that are in ``folder`` thereafter, with a state each."""
    before, rows = len(states(folder)), sum(length // PAGE for length in LENGTHS)
    turn = ask(server, prompts)
    wait_for(lambda: len(states(folder)) >= before + 2, "states in storage")
    wait_for(lambda: len([*folder.glob("*.bin")]) - len(states(folder)) >= rows, "rows in storage")
    return turn


@pytest.mark.parametrize("version", sorted({FROM, installed()}))
def test_states_outlive_the_server(version: str, model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """The next server computes nothing that the first one has, and no sink; damaged states are computed again."""
    folder, (first, second) = tmp_path / "store", expected
    with server_on(folder, model, tmp_path / "first", version=version) as server:
        computed = write(folder, server, first.prompts)
        assert from_storage(computed.answers) == [0, 0]
        assert_same(first.answers, computed.answers, NEAR_TIE, DRIFT)
    chunks = ["--chunked-prefill-size", "128"]
    with server_on(folder, model, tmp_path / "second", *chunks, version=version) as server:
        again = ask(server, second.prompts)
        assert all(
            hit >= length // PAGE * PAGE for hit, length in zip(from_storage(again.answers), LENGTHS, strict=True)
        )
        assert refills(server) == 0
        assert_same(second.answers, again.answers, NEAR_TIE, DRIFT)
    for number, path in enumerate(states(folder)):
        content = bytearray(path.read_bytes())
        content[500] ^= 1
        path.write_bytes(content[:-1000] if number % 2 else content)
    with server_on(folder, model, tmp_path / "third", version=version) as server:
        computed = ask(server, first.prompts)
        assert from_storage(computed.answers) == [0, 0]
        assert_same(first.answers, computed.answers, NEAR_TIE, DRIFT)
        assert server.text().count("is damaged") >= 2


def test_windows_of_another_kind(model: Path, expected: list[Turn], tmp_path: Path) -> None:
    """Where windows do not come along, the check sees it; and a server with other windows finds nothing."""
    folder, prompts = tmp_path / "store", expected[0].prompts
    with server_on(folder, model, tmp_path / "first") as server:
        write(folder, server, prompts)
    with server_on(folder, model, tmp_path / "unread", LATE_HOST_WINDOWS_UNREAD="1") as server:
        with pytest.raises(requests.HTTPError):
            ask(server, prompts)
        assert "the model's output is not a number (NaN)" in server.text()
    with server_on(folder, model, tmp_path / "other", SGLANG_MIXED_KV_RECENT_TOKENS="128") as server:
        assert from_storage(write(folder, server, prompts).answers) == [0, 0]
