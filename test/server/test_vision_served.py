"""Models that read images, behind int2 servers: answers are those of stock SGLang, and images keep prefixes apart.

Rows are lossless, and NaN where a window must be read; a sink block is NaN until it is filled. There are fewer sink
blocks than images, so that sinks with tokens of images are computed again.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from support import vision_models
from support.api import retracted
from support.compare import LOGPROBS, assert_same, first_difference, largest_drift
from support.releases import environment, installed, served
from support.servers import HADAMARD, RETRACTED, STRICT, Server, refills, serve
from support.speculation import with_plugins
from support.vision_models import Prompt, letters

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "2", *COMMON]
NEAR_TIE = DRIFT = 0.06
TOKENS = 12


def prompts(image_token: str) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts whose sink holds an image, all with the same text; and prompts whose sink is the same text.

    Of images in the sink two end within it, and the others go on behind it, in two shapes.
    """
    sizes = [(320, 256), (320, 256), (256, 320), (256, 320), (96, 64), (96, 64)]
    images = [vision_models.image(seed, *size) for seed, size in enumerate(sizes)]
    question, opening = letters(400, seed=1), letters(150, seed=2)
    begin = [(image_token + question, [image]) for image in images]
    behind = [(opening + image_token + question, [image]) for image in images[:2]]
    behind.append((opening + question, []))
    behind.append((opening + image_token * 2 + question, [images[0], images[2]]))
    return begin, behind


def ask(server: Server, asked: list[Prompt], workers: int = 1) -> list[dict[str, Any]]:
    def one(prompt: Prompt) -> dict[str, Any]:
        text, images = prompt
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling} | LOGPROBS | ({"image_data": images} if images else {})
        reply = requests.post(f"{server.url}/generate", json=body, timeout=1500)
        reply.raise_for_status()
        return reply.json()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, asked))


def later(asked: list[Prompt]) -> list[Prompt]:
    """A second turn of every conversation."""
    return [(text + letters(300, seed=3), images) for text, images in asked]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def fitted(dump: Path) -> dict[str, str]:
    """Rotations fitted to a dump, as settings of a server."""
    command = [str(Path(sys.executable).with_name("oscar")), "fit", str(dump), "--out", str(dump)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    sides = {side.upper(): next(dump.glob(f"{side}_rotation_*.safetensors")) for side in "kv"}
    return {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(path) for side, path in sides.items()}


HOST = ["--enable-hierarchical-cache", "--hicache-ratio", "6", "--hicache-mem-layout", "page_first"]
HOST += ["--max-total-tokens", "2048"]
"""Tokens of some of the prompts."""
CHUNKS = ["--chunked-prefill-size", "128"]
CONFIGURATIONS: dict[str, tuple[str, list[str], int, bool]] = {
    "qwen3_vl": (installed(), [*CHUNKS, "--speculative-algorithm", "NGRAM"], 3, False),
    "qwen2_5_vl": (served()[0], [*CHUNKS, "--enable-mixed-chunk", *HOST], 1, True),
    "mistral3": (served()[0], CHUNKS, 3, False),
}
"""By model: release, arguments, requests at once, and whether rotations are fitted to a dump of the stock server or
requests are retracted. The oldest release has another scheduler of images."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_answers_are_those_of_stock(name: str, tmp_path: Path) -> None:
    """First turns, the same again, and second turns, which hit the prefix cache."""
    version, args, workers, fits = CONFIGURATIONS[name]
    release = environment(version)
    model, dump = vision_models.save(name, tmp_path / "model"), tmp_path / "dump"
    begin, behind = prompts("[IMG]" if name == "mistral3" else vision_models.IMAGE)
    asked = begin + behind
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": "4000", "DUMP_KVCACHE_DIR": str(dump)} if fits else {}
    with serve(model, tmp_path / "stock", "--attention-backend", "torch_native", *COMMON, env=release | env) as server:
        expected, expected_later = ask(server, asked, 2), ask(server, later(asked), 2)
    rotations = fitted(dump) if fits else HADAMARD
    for x, y in itertools.combinations(expected[: len(begin)], 2):
        assert first_difference(x, y) or largest_drift(x, y) > DRIFT, "images do not show in the answers"

    env = release | rotations | STRICT | ({} if fits else RETRACTED)
    env = with_plugins(env, "lossless_plugin", "late_host_plugin", "roomy_host_plugin")
    with serve(model, tmp_path / "log", *INT2, *args, env=env) as server:
        assert_same(expected, ask(server, asked, workers), NEAR_TIE, DRIFT)
        before = refills(server)
        again = ask(server, asked, workers)
        assert_same(expected, again, NEAR_TIE, DRIFT)
        assert min(cached(again)) >= 128, cached(again)
        assert refills(server) - before >= len(begin) - 4
        second = ask(server, later(asked), workers)
        assert_same(expected_later, second, NEAR_TIE, DRIFT)
        assert min(cached(second)) >= 384, cached(second)
        assert (retracted(server) > 0) == ("SGLANG_TEST_RETRACT" in env)
        assert server.alive()
