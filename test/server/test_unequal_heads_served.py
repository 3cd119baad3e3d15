"""A model whose heads of keys and values differ in size: dumped by an ordinary server, fitted, and served.

Rows are lossless, and NaN where a window of int2 mode must be read: answers are those of stock SGLang. A value row that
is read with key offsets, or a scale of the other head size, would show.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_rotation.dump import DumpReader
from oscar_rotation.files.rotation_file import read_rotation_file
from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY
from support.servers import STRICT, TWO_CORES, TWO_RANKS, Server, serve
from support.speculation import plugins
from support.unequal_models import FULL, KEY_DIM, KV_HEADS, VALUE_DIM, save

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head", "--moe-runner-backend", "triton"]
INT2 = ["--kv-cache-dtype", "int2", "--max-running-requests", "2", "--chunked-prefill-size", "256", *COMMON]
NEAR_TIE = DRIFT = 0.12
"""Of answers with transforms: 16-bit windows are rounded in another basis than stock's."""
LENGTHS, TOKENS = [40, 330, 500, 620], 12


def prompts() -> list[list[int]]:
    rng = random.Random(17)
    return [rng.choices(range(VOCABULARY), k=length) for length in LENGTHS]


def answers(server: Server) -> list[dict[str, Any]]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in prompts()]


def test_dumped_fitted_and_served(tmp_path: Path) -> None:
    model, folder = save(tmp_path / "model"), tmp_path / "dump"
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": str(sum(LENGTHS)), "DUMP_KVCACHE_DIR": str(folder)}
    stock = ["--attention-backend", "intel_amx", *COMMON]
    with serve(model, tmp_path / "stock", *stock, env=plugins("gpt_oss_plugin") | env, warm_up=True) as server:
        expected = answers(server)
        assert "dump complete" in server.text()
    found = DumpReader(folder)
    assert found.manifest is not None
    assert (found.manifest.layer_ids, found.manifest.head_dim, found.manifest.value_head_dim) == (
        FULL,
        KEY_DIM,
        VALUE_DIM,
    )
    assert found.output_reader(0).shape == (KV_HEADS, VALUE_DIM, VALUE_DIM)
    command = [str(Path(sys.executable).with_name("oscar")), "fit", str(folder), "--out", str(tmp_path)]
    done = subprocess.run([*command, "--bits", "k3v2"], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    files = [next(tmp_path.glob(f"{side}_rotation_*.safetensors")) for side in "kv"]
    for path, head_dim in zip(files, (KEY_DIM, VALUE_DIM), strict=True):
        fitted = read_rotation_file(path)
        assert (fitted.layer_ids, fitted.head_dim) == (FULL, head_dim)
    env = plugins("gpt_oss_plugin", "lossless_plugin") | STRICT
    env |= {"SGLANG_OSCAR_K_ROTATION_PATH": str(files[0]), "SGLANG_OSCAR_V_ROTATION_PATH": str(files[1])}
    for log, ranks in (("log", []), ("two_ranks", TWO_RANKS)):
        with serve(model, tmp_path / log, *INT2, *ranks, env=env | (TWO_CORES if ranks else {})) as server:
            first, again = answers(server), answers(server)
            assert again[-1]["meta_info"]["cached_tokens"] >= LENGTHS[-1] - 256 - 64
            assert "keys 3, values 2" in server.text()
            assert server.alive()
        assert_same(expected, first, NEAR_TIE, DRIFT)
        assert_same(expected, again, NEAR_TIE, DRIFT)
