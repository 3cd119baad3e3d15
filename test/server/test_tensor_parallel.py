"""Two ranks give one rank's answers: both store, share and evict the same blocks without a word to each other."""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from support.compare import LOGPROBS, assert_same
from support.models import COMMON, VOCABULARY, save
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
ARGS = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--skip-tokenizer-init"]
NEAR_TIE = 0.05
DRIFT = 0.08


def prompts() -> list[list[int]]:
    """Short and long, two of them with a common beginning."""
    rng = random.Random(11)
    ids = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (40, 330, 700, 900)]
    return [*ids, ids[2][:600] + ids[1]]


def ask(server: Server) -> list[list[dict]]:
    """Answers cold, one at a time, and with prefix hits, all at once."""
    with ThreadPoolExecutor(len(prompts())) as pool:
        cold = [server.generate(ids, 16, **LOGPROBS) for ids in prompts()]
        warm = list(pool.map(lambda ids: server.generate(ids, 16, **LOGPROBS), prompts()))
    return [cold, warm]


def plus_files(folder: Path) -> dict[str, str]:
    """Files of the recipe plus for the random model: a transform far from orthogonal and a center for each kv head, in
    one layer also a width, so that rows of two ranks have two sizes."""
    layers, heads, d = (COMMON[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    random_numbers = torch.Generator().manual_seed(12)
    env = {"SGLANG_OSCAR_RECIPE": "plus"}
    for side in ("k", "v"):
        mixed = torch.randn(layers, heads, d, d, generator=random_numbers).double()
        transforms = torch.linalg.qr(mixed)[0] * torch.logspace(-0.3, 0.3, d).double()
        centers = torch.randn(layers, heads, d, generator=random_numbers) if side == "k" else None
        content = RotationSet(
            transforms.float(), metadata=RotationMetadata(side=side), duals=torch.linalg.inv(transforms).mT.float(),
            centers=centers, gains=(0.98,) * layers, bits=((2, 3), *(2,) * (layers - 1)) if side == "k" else None,
        )  # fmt: skip
        save_rotation_file(folder / f"{side}.safetensors", content)
        env[f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"] = str(folder / f"{side}.safetensors")
    return env


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="binds two processes to two cores")
@pytest.mark.parametrize("recipe", ["paper", "plus per head"])
def test_two_ranks_equal_one(tmp_path: Path, recipe: str) -> None:
    """Each rank holds one of two kv heads, its center, its matrices, and its windows."""
    model = save("qwen3", tmp_path / "model")
    env = LOSSLESS | STRICT | (HADAMARD if recipe == "paper" else plus_files(tmp_path))
    with serve(model, tmp_path / "one.log", *ARGS, env=env) as server:
        expected = ask(server)
    # Two sink blocks for three beginnings: ranks compute lost blocks again, each its own heads.
    few = ["--max-running-requests", "1"] if recipe == "paper" else []
    with serve(model, tmp_path / "two.log", *ARGS, *TWO_RANKS, *few, env=env | TWO_CORES) as server:
        got = ask(server)
        server.flush()
        assert server.alive()
        text = server.text()
    assert set(re.findall(r"(TP\d)\] int2 sink refill: ", text)) == ({"TP0", "TP1"} if few else set())
    for one, two in zip(expected, got, strict=True):
        assert_same(one, two, NEAR_TIE, DRIFT)
    assert [a["meta_info"]["cached_tokens"] for a in got[1]] == [a["meta_info"]["cached_tokens"] for a in expected[1]]
    assert any(answer["meta_info"]["cached_tokens"] for answer in got[1])
