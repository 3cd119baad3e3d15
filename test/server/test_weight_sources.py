"""Weights that come later, in parts, or as adapters: servers answer as one that was started on them, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import init_custom_process_group

from oscar_tools.local_server import free_port
from support.models import COMMON, VOCABULARY, save
from support.servers import EXACT, HADAMARD, STRICT, Server, serve
from support.weights import SESSIONS, post, send

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are handed over in host memory, sums are gloo's"),
]
INT2 = ["--kv-cache-dtype", "int2", "--skip-tokenizer-init", "--enable-fp32-lm-head"]
ROWS = {"exact": EXACT, "2 bits": HADAMARD}


def ask(server: Server) -> list[Any]:
    """Tokens and log probabilities of a long prompt, and of another that hits a part of it."""
    rng = random.Random(4)
    ids = [rng.randrange(VOCABULARY) for _ in range(700)]
    answers = [server.generate(one, 12, return_logprob=True) for one in (ids, ids[:512] + ids[:99])]
    assert [answer["meta_info"]["cached_tokens"] > 0 for answer in answers] == [False, True]
    return [answer["meta_info"]["output_token_logprobs"] for answer in answers]


@pytest.fixture(scope="module")
def others(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    folder = save("qwen3", tmp_path_factory.mktemp("others"))
    generator = torch.Generator().manual_seed(9)
    weights = {name: x[torch.randperm(len(x), generator=generator)] for name, x in load_file(folder / FILE).items()}
    save_file(weights, folder / FILE, {"format": "pt"})
    return folder


FILE = "model.safetensors"


@pytest.fixture(params=ROWS, scope="module")
def rows(request: pytest.FixtureRequest) -> dict[str, str]:
    return ROWS[request.param] | STRICT


@pytest.fixture(scope="module")
def expected(rows: dict[str, str], others: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a server that was started on these weights answers."""
    with serve(others, tmp_path_factory.mktemp("expected") / "log", *INT2, env=rows) as server:
        return ask(server)


@pytest.fixture(scope="module")
def server(rows: dict[str, str], qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that begins with random weights, as rollouts of a trainer do."""
    args = [*INT2, "--load-format", "dummy"]
    with serve(qwen3, tmp_path_factory.mktemp("updated") / "log", *args, env=rows, warm_up=True) as started:
        yield started
        assert started.alive()
        assert "Traceback" not in started.text()


def from_disk(server: Server, folder: Path) -> None:
    post(server, "update_weights_from_disk", model_path=str(folder), load_format="auto")


def from_tensor(server: Server, folder: Path) -> None:
    """In two parts, as trainers send buckets; only the second flushes the cache."""
    weights = sorted(load_file(folder / FILE).items())
    send(server, weights[: len(weights) // 2], weights[len(weights) // 2 :], flush=True)


def from_distributed(server: Server, folder: Path) -> None:
    """Broadcast by the trainer, which is this process."""
    weights = load_file(folder / FILE)
    group = {"world_size": 2, "group_name": "trainer", "backend": "gloo"}
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        there = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        joined = pool.submit(post, server, "init_weights_update_group", **there, **group)
        here = {"init_method": f"tcp://127.0.0.1:{port}", "rank": 0, "timeout": timedelta(minutes=10)}
        trainer = init_custom_process_group(**here, **group)
        joined.result()
        if SESSIONS:
            post(server, "begin_weight_update")
        said = {
            "names": list(weights),
            "dtypes": [str(x.dtype).removeprefix("torch.") for x in weights.values()],
            "shapes": [list(x.shape) for x in weights.values()],
        }
        updated = pool.submit(post, server, "update_weights_from_distributed", **said, group_name="trainer")
        for tensor in weights.values():
            torch.distributed.broadcast(tensor, src=0, group=trainer)
        updated.result()
    if SESSIONS:
        post(server, "end_weight_update")
    torch.distributed.destroy_process_group(trainer)


@pytest.mark.parametrize("update", [from_tensor, from_disk, from_distributed])
def test_updated_weights(update: Any, server: Server, qwen3: Path, others: Path, expected: list[Any]) -> None:
    """Of a server whose cache holds what other weights computed."""
    if update is not from_tensor:
        from_disk(server, qwen3)
    assert ask(server) != expected
    update(server, others)
    assert ask(server) == expected


def test_a_checkpoint_with_some_weights_only(
    server: Server, qwen3: Path, others: Path, expected: list[Any], tmp_path: Path
) -> None:
    """The others stay as they are."""
    from_disk(server, others)
    weights = load_file(others / FILE)
    chosen = {name: x for name, x in weights.items() if "layers.1.self_attn.v_proj" in name or "o_proj" in name}
    assert len(chosen) == 1 + COMMON["num_hidden_layers"]
    for path in qwen3.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(chosen, tmp_path / FILE, {"format": "pt"})
    from_disk(server, tmp_path)
    assert ask(server) == expected
    from_disk(server, qwen3)
    assert ask(server) != expected


@pytest.mark.parametrize("rows", ["2 bits"], indirect=True)
def test_a_presharded_checkpoint(rows: dict[str, str], others: Path, expected: list[Any], tmp_path: Path) -> None:
    """Written by the first server from its memory, read by the second."""
    for said in ("doing first-time load and dump", "Loading from presharded checkpoint"):
        with serve(others, tmp_path / "log", *INT2, "--load-format", "presharded", env=rows) as server:
            assert ask(server) == expected
            assert said in server.text()
