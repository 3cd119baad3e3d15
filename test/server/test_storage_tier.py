"""Pages in storage (``--hicache-storage-backend file``): found again after a restart, by servers with the same rows of
the same model only, and never served where they are damaged."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from support.api import from_storage, wait_for
from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY, save
from support.releases import environment, installed, needs_newer_python, served
from support.servers import HADAMARD, IDENTITY, STRICT, Server, refills, serve
from support.speculation import with_plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sources are served without compiled extensions"),
]
INT2 = ["--kv-cache-dtype", "int2", "--skip-tokenizer-init", "--enable-fp32-lm-head"]
TIERS = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
TIERS += ["--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "4096", "--hicache-ratio", "4"]
GROUP = ["--kv-cache-quant-group-size", "64"]
LENGTH, PAGE, STORED = 900, 64, 640
"""Of a prompt, of a page, and what a hit on the prompt may have."""
TOKENS = 8
POISON = 7
NEAR_TIE = DRIFT = 0.06


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(23)
    return [[rng.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(count)]


@contextmanager
def server_on(
    folder: Path, model: Path, log: Path, *args: str, version: str | None = None, **env: str
) -> Iterator[Server]:
    """A server that stores its pages in ``folder``."""
    env = HADAMARD | STRICT | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)} | env
    env = with_plugins(environment(version or installed(), **env), "roomy_host_plugin")
    args = (*INT2, *TIERS, *(args or GROUP))
    with serve(model, log, *args, env=env) as server:
        yield server
        assert server.alive()


def ask(server: Server, asked: list[list[int]]) -> list[dict]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in asked]


def write(folder: Path, server: Server, asked: list[list[int]]) -> list[dict]:
    """Answers to prompts whose pages are all in ``folder`` thereafter."""
    before = len(list(folder.glob("*.bin")))
    answers = ask(server, asked)
    wait_for(lambda: len(list(folder.glob("*.bin"))) >= before + len(asked) * (LENGTH // PAGE), "pages in storage")
    return answers


def damage(folder: Path) -> dict[Path, bytes]:
    """Change a byte of every second page and cut the others; returns what they were."""
    written = {path: path.read_bytes() for path in sorted(folder.glob("*.bin"))}
    for number, (path, content) in enumerate(written.items()):
        path.write_bytes(content[:-1000] if number % 2 else content[:500] + bytes([content[500] ^ 1]) + content[501:])
    return written


@pytest.mark.parametrize("version", served())
def test_hits_outlive_the_server(version: str, model: Path, tmp_path: Path) -> None:
    """Damaged pages are computed again, once; then the next server answers with what the first one stored, whatever
    host memory looks like."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    folder, asked = tmp_path / "store", prompts(2)
    with server_on(folder, model, tmp_path / "first", version=version) as server:
        first = write(folder, server, asked)
        device = ask(server, asked)  # read in 2 bits where the first answers were computed
        assert from_storage(first) == from_storage(device) == [0, 0]
        assert all(answer["meta_info"]["cached_tokens"] >= STORED for answer in device)
        server.flush()
        written = damage(folder)

        def mended() -> int:
            return sum(path.exists() and path.read_bytes() == content for path, content in written.items())

        computed = ask(server, asked)
        wait_for(lambda: mended() == len(asked) * STORED // PAGE, "pages that were found damaged are written anew")
        assert from_storage(computed) == [0, 0]
        assert "is damaged" in server.text()
        for one, other in zip(first, computed, strict=True):
            assert one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]
    layout = ["--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_back"]
    with server_on(folder, model, tmp_path / "second", *GROUP, *layout, version=version) as server:
        again = ask(server, asked)
        assert from_storage(again) == [STORED, STORED]
        assert refills(server) == 2
        assert_same(device, again, NEAR_TIE, DRIFT)  # sinks that are computed again differ in their last bits


@pytest.mark.parametrize("version", served()[:1])
def test_name_spaces_part_what_is_stored(version: str, model: Path, tmp_path: Path) -> None:
    """Nobody finds pages of another name space, behind a hit of its own neither, nor of one those without."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    folder, (ids,) = tmp_path / "store", prompts(1)

    def found(server: Server, **space: str) -> int:
        return from_storage([server.generate(ids, TOKENS, **space, **LOGPROBS)])[0]

    with server_on(folder, model, tmp_path / "log", version=version) as server:
        server.generate(ids, TOKENS, extra_key="a")
        wait_for(lambda: len(list(folder.glob("*.bin"))) >= LENGTH // PAGE, "pages in storage")
        server.flush()
        server.generate(ids[: 5 * PAGE], 1, extra_key="b")
        assert [found(server, extra_key="b"), found(server)] == [0, 0]
        server.generate(ids[: 5 * PAGE], 1, extra_key="a")
        assert found(server, extra_key="a") > 0


def test_pages_with_nan_are_not_stored(tmp_path: Path) -> None:
    """Of a request with a token whose embedding is not finite; what others have computed is."""
    model, folder = save("qwen3", tmp_path / "qwen3"), tmp_path / "store"
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    clean, poisoned = ([token for token in ids if token != POISON] for ids in prompts(2))
    poisoned[5 * PAGE] = POISON
    with server_on(folder, model, tmp_path / "log") as server:
        write(folder, server, [clean])
        before = len(list(folder.glob("*.bin")))
        with pytest.raises(requests.HTTPError):
            server.generate(poisoned, 1)
        wait_for(lambda: "the model's output is not a number (NaN)" in server.text(), "a line in the log")
        assert len(list(folder.glob("*.bin"))) <= before + 5


OTHERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "rotation": (GROUP, IDENTITY),
    "exact": (GROUP, {"SGLANG_OSCAR_K_BITS": "16", "SGLANG_OSCAR_V_BITS": "16"}),
}


def test_settings_share_a_folder_and_nothing_in_it(model: Path, tmp_path: Path) -> None:
    """Another rotation, rows of a BF16 cache, or weights that were updated: none finds anything of the others."""
    folder, asked = tmp_path / "store", prompts(1)
    with server_on(folder, model, tmp_path / "own") as server:
        write(folder, server, asked)
        pages = LENGTH // PAGE
        for number, (name, (args, env)) in enumerate(OTHERS.items(), start=2):
            with server_on(folder, model, tmp_path / name, *args, **env) as other:
                answers = write(folder, other, asked)
            assert answers[0]["meta_info"]["cached_tokens"] == 0, name
            assert len(list(folder.glob("*.bin"))) == number * pages, name
        server.flush()
        again = ask(server, asked)
        assert from_storage(again) == [STORED]

        def updated() -> bool:
            """SGLang flushes no cache whose pages are still on their way to storage, and says so."""
            body = {"model_path": str(model)}
            return bool(requests.post(f"{server.url}/update_weights_from_disk", json=body, timeout=600).ok)

        wait_for(updated, "an update of weights")
        assert from_storage(write(folder, server, asked)) == [0]
    assert len(list(folder.glob("*.bin"))) == (len(OTHERS) + 2) * pages
    with server_on(folder, model, tmp_path / "last") as server:
        assert from_storage(ask(server, asked)) == [STORED]
