"""Decode steps of a real server inside torch.compile, on a CPU: one graph per batch size, or the server ends.

Where SGLang's own layers cannot be traced as a whole, a step is several graphs, with attention in one of every layer.
"""

from __future__ import annotations

import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.compare import LOGPROBS, assert_same
from support.models import COMMON, VOCABULARY
from support.servers import HADAMARD, STRICT, Server, compiled_calls, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU server compiles by itself, see test/gpu"),
]
SUPPORT = Path(__file__).parents[1] / "support"
COMPILES = str(SUPPORT / "cpu_compile_plugin")
LOSSLESS = str(SUPPORT / "lossless_plugin")
ARGS = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *ARGS]
COMPILED = [*INT2, "--enable-torch-compile", "--torch-compile-max-bs", "2", "--cuda-graph-bs-decode"]
"""The sizes of batches that are compiled follow: smaller ones are padded, larger ones are not compiled."""
NEAR_TIE = 0.06
DRIFT = 0.06


def ask(server: Server, workers: int) -> list[dict]:
    """Answers to short and long prompts."""
    rng = random.Random(5)
    asked = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (40, 330, 700, 120, 64, 400, 500, 260)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, 12, **LOGPROBS), asked))


def test_one_graph_gives_the_eager_answers(qwen3: Path, tmp_path: Path) -> None:
    """Operators are those of eager code, so log probabilities agree bit for bit. Those of several requests depend on
    who is computed with whom, and in 16 bits codes do, too."""
    exact = ["--dtype", "float32"]
    env = HADAMARD | STRICT | {"PYTHONPATH": COMPILES, "CPU_COMPILE_BACKEND": "aot_eager", "CPU_COMPILE_LOGS": "1"}
    with serve(qwen3, tmp_path / "eager.log", *INT2, *exact, env=env) as server:
        one, three = ask(server, 1), ask(server, 3)
        assert compiled_calls(server.text()) == []
    with serve(qwen3, tmp_path / "compiled.log", *COMPILED, "1", "2", *exact, env=env) as server:
        assert "one operator per layer inside torch.compile, up to 2 requests" in server.text()
        calls, layers = compiled_calls(server.text()), COMMON["num_hidden_layers"]
        whole = "cpu_compile: aot_eager, one graph of" in server.text()
        if whole:
            assert calls == [layers] * 2
        else:  # SGLang's trial runs of a batch size compile some layers again
            assert set(calls) == {1}
            assert len(calls) >= layers * 2
        assert [answer["meta_info"]["output_token_logprobs"] for answer in ask(server, 1)] == [
            answer["meta_info"]["output_token_logprobs"] for answer in one
        ]
        assert_same(three, ask(server, 3), NEAR_TIE, DRIFT)
        assert whole or compiled_calls(server.text()) == calls, "a step was compiled while serving"
        assert "recompile_limit" not in server.text()
        assert server.alive()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_equals_stock(qwen3: Path, stock_qwen3: Server, tmp_path: Path) -> None:
    """Lossless rows: fused kernels around attention change nothing but rounding."""
    expected = ask(stock_qwen3, 1)
    plugins = {"PYTHONPATH": os.pathsep.join([COMPILES, LOSSLESS])}
    env = HADAMARD | STRICT | plugins
    with serve(qwen3, tmp_path / "int2.log", *COMPILED, "2", env=env) as server:
        for workers in (1, 2):
            assert_same(expected, ask(server, workers), NEAR_TIE, DRIFT)
        assert server.alive()
