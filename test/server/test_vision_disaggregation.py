"""Images with prefill and decode apart: answers are those of stock SGLang on one server.

Rows are lossless, and NaN where a window must be read; rings and sink blocks are NaN until they are filled. The decode
server computes sinks with tokens of images itself, those that answers complete among them.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support import hybrid_models, vision_models
from support.compare import LOGPROBS, assert_same, first_difference, largest_drift
from support.disaggregated import Pair, backend_params, serve_pair
from support.releases import environment, installed
from support.servers import HADAMARD, STRICT, Server, refills, serve
from support.speculation import with_plugins
from support.vision_models import Prompt, letters

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--enable-fp32-lm-head"]
FLOAT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "qwen3_vl": ([], []),
    "qwen2_5_vl": ([], []),
    "qwen3_5": (
        ["--dtype", "float32"],
        ["--max-mamba-cache-size", "64", "--mamba-track-interval", "128"],
    ),
}
"""By model: arguments of all servers, and of those in int2 mode."""
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "4", *COMMON]
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
NEAR_TIE = DRIFT = 0.06
TOKENS = 24
SIZES = [(320, 256), (320, 256), (256, 320), (96, 64), (96, 64)]
"""Images that go on behind the sink, two of one shape and one of another, and two that end within it."""


def prompts() -> tuple[list[Prompt], list[Prompt]]:
    """Prompts with an image in the sink, all with the same text; and prompts that end within the sink, two with their
    answers and two without, and one whose image stands behind the sink."""
    images = [vision_models.image(seed, *size) for seed, size in enumerate(SIZES)]
    begin = [(vision_models.IMAGE + letters(400, seed=1), [image]) for image in images]
    short = [(letters(length, 2) + vision_models.IMAGE + "?", [image]) for length in (3, 48) for image in images[3:]]
    return begin, [*short, (letters(150, seed=2) + vision_models.IMAGE + letters(9, seed=3), images[:1])]


def ask(server: Server | Pair, asked: list[Prompt], workers: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda prompt: vision_models.ask(server, prompt, TOKENS, **LOGPROBS), asked))


@pytest.mark.parametrize("backend", backend_params())
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_stock(name: str, backend: str, tmp_path: Path) -> None:
    """One after the other; then four at a time, with chunks, hits on the prefill server, and requests that the decode
    server retracts."""
    release = environment(installed()) | FLOAT
    save = hybrid_models.save if name in hybrid_models.SEEING else vision_models.save
    model = save(name, tmp_path / "model")
    of_all, of_int2 = KINDS[name]
    begin, others = prompts()
    stock = ["--attention-backend", "torch_native", "--disable-radix-cache", *COMMON, *of_all]
    with serve(model, tmp_path / "stock", *stock, env=release) as server:
        expected = ask(server, begin + others, 2)
    for x, y in itertools.combinations(expected[: len(begin)], 2):
        assert first_difference(x, y) or largest_drift(x, y) > DRIFT, "images do not show in the answers"

    env = with_plugins(release | HADAMARD | STRICT, "lossless_plugin", "no_gpu_plugin")
    args, chunks = [*INT2, *of_all, *of_int2], ("--chunked-prefill-size", "128")
    with serve_pair(model, tmp_path, *args, backend=backend, env=env, prefill=chunks, of_decode=RETRACTING) as pair:
        assert_same(expected, ask(pair, begin + others, 1), NEAR_TIE, DRIFT)
        again = ask(pair, begin + others, 4)
        assert_same(expected, again, NEAR_TIE, DRIFT)
        assert min(answer["meta_info"]["cached_tokens"] for answer in again[: len(begin)]) >= 128
        assert refills(pair.decode) > len(begin)
        assert "#retracted_reqs" in pair.decode.text()
        assert pair.prefill.alive()
        assert pair.decode.alive()
