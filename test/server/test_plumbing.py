"""Int2 mode with lossless rows equals stock BF16 SGLang: windows, pages, prefix hits, rotations, scheduling.

Rows are exact and NaN wherever the BF16 windows must be read, so any token that comes from the wrong place shows.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from oscar_rotation.dump import DumpWriter
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.side_codes import SideCodes, with_bits
from oscar_rotation.recipes.focus import fit_focus
from oscar_rotation.recipes.plus import KEY_ROWS, VALUE_ROWS
from support.api import retracted
from support.compare import LOGPROBS, assert_same
from support.models import VOCABULARY, save
from support.releases import PYTHON_CORE, has_compiled_tree
from support.servers import HADAMARD, STRICT, Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
]
LOSSLESS = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "lossless_plugin")}
# Logits in float32: BF16 ones come in steps of 0.0625 between 8 and 16, and a random model has many ties in those.
COMMON = ["--skip-tokenizer-init", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", *COMMON]
STOCK = ["--attention-backend", "torch_native", *COMMON]
NEAR_TIE = 0.06
DRIFT = 0.06
TOKENS = 16
PROMPTS = 9


def prompts(count: int, longest: int = 1400, seed: int = 3) -> list[list[int]]:
    """Random prompts; every third begins with a shared 700-token prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCABULARY) for _ in range(700)]
    out = []
    for number in range(count):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(35, longest))]
        out.append(shared + ids[:300] if number % 3 == 0 else ids)
    return out


def ask(server: Server, requests: list[list[int]], workers: int = 1, tokens: int = TOKENS) -> list[dict]:
    """Answers to all requests, ``workers`` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda ids: server.generate(ids, tokens, **LOGPROBS), requests))


@pytest.fixture(scope="module")
def expected(stock_qwen3: Server) -> list[dict]:
    """What stock SGLang answers to ``prompts(PROMPTS)``."""
    return ask(stock_qwen3, prompts(PROMPTS), workers=4)


CONFIGURATIONS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "chunked_mixed_retracted": (
        ["--chunked-prefill-size", "128", "--enable-mixed-chunk"],
        {"SGLANG_TEST_RETRACT": "1"},
        12,
    ),
    "few_rows_evictions_small_windows": (
        ["--max-running-requests", "3", "--max-total-tokens", "4608"],
        {"SGLANG_MIXED_KV_PREFIX_TOKENS": "16", "SGLANG_MIXED_KV_RECENT_TOKENS": "24"},
        12,
    ),
    "no_recompute_large_pages": (["--page-size", "128"], {"SGLANG_OSCAR_RECOMPUTE_RECENT": "0"}, 4),
}
"""Ways of scheduling and configuring: arguments, environment and requests at once."""
if has_compiled_tree():
    _evicting = CONFIGURATIONS["few_rows_evictions_small_windows"]
    CONFIGURATIONS["few_rows_evictions_prefix_tree_in_python"] = (_evicting[0], _evicting[1] | PYTHON_CORE, 12)
ARCHITECTURES = ["llama", "qwen3", "glm4_moe", "qwen3"]


@pytest.mark.parametrize(("name", "architecture"), list(zip(CONFIGURATIONS, ARCHITECTURES, strict=False)))
def test_configurations_equal_stock(
    name: str, architecture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Hadamard rotations on keys and values: stock's answers, one pass cold and one with prefix hits.

    Configurations have models of several architectures; that of the recipes below is qwen3.
    """
    args, env, workers = CONFIGURATIONS[name]
    if architecture == "qwen3":
        model, expected = request.getfixturevalue("qwen3"), request.getfixturevalue("expected")
    else:
        model = save(architecture, tmp_path / "model")
        with serve(model, tmp_path / "stock.log", *STOCK) as server:
            expected = ask(server, prompts(PROMPTS), workers=4)
    with serve(model, tmp_path / "log", *INT2, *args, env=LOSSLESS | HADAMARD | STRICT | env) as server:
        for _ in range(2):
            answers = ask(server, prompts(PROMPTS), workers)
            assert_same(expected, answers, NEAR_TIE, DRIFT)
        if "--max-total-tokens" not in args:
            assert any(answer["meta_info"]["cached_tokens"] for answer in answers)
        server.flush()
        assert_same(expected[:3], ask(server, prompts(PROMPTS)[:3]), NEAR_TIE, DRIFT)
        assert server.alive()
        if env.keys() & PYTHON_CORE.keys():
            assert "RustUnifiedTreeCore" not in server.text()
        if "SGLANG_TEST_RETRACT" in env:
            assert retracted(server) > 0


def test_experts_equal_stock(tmp_path: Path) -> None:
    """Few tokens: random experts are near ties, and now and then the last bits of a token decide which it gets."""
    model, asked = save("qwen3_moe", tmp_path / "model"), prompts(4, longest=900)
    with serve(model, tmp_path / "stock.log", *STOCK) as server:
        expected = ask(server, asked, tokens=12)
    with serve(model, tmp_path / "int2.log", *INT2, env=LOSSLESS | HADAMARD | STRICT) as server:
        got, again = (ask(server, asked, tokens=12) for _ in range(2))
        assert server.alive()
    assert_same(expected, got, NEAR_TIE, DRIFT)
    assert_same(expected, again, NEAR_TIE, DRIFT)
    assert any(answer["meta_info"]["cached_tokens"] for answer in again)


def plus_files(folder: Path, layers: int = 3, kv_heads: int = 2, head_dim: int = 64) -> dict[str, str]:
    """Transforms per kv head that are far from orthogonal, and centers far from zero."""
    generator = torch.Generator().manual_seed(5)

    def transforms() -> tuple[torch.Tensor, torch.Tensor]:
        basis = torch.linalg.qr(torch.randn(layers, kv_heads, head_dim, head_dim, generator=generator).double())[0]
        found = basis * torch.linspace(0.5, 2, head_dim).double()
        return found.float(), torch.linalg.inv(found).mT.float()

    centers = 2 * torch.randn(layers, kv_heads, head_dim, generator=generator)
    for side, center in (("k", centers), ("v", None)):
        transform, dual = transforms()
        save_rotation_file(folder / f"{side}.safetensors", RotationSet(transform, duals=dual, centers=center))
    return {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(folder / f"{side}.safetensors") for side in "kv"}


def test_recipe_plus_equals_stock(qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Centered keys, transforms that are not orthogonal: chunks, prefixes and decoded tokens."""
    env = LOSSLESS | STRICT | plus_files(tmp_path)
    with serve(qwen3, tmp_path / "log", *INT2, "--chunked-prefill-size", "128", env=env) as server:
        for _ in range(2):
            assert_same(expected, ask(server, prompts(PROMPTS), workers=4), NEAR_TIE, DRIFT)
        assert server.alive()


def test_recipe_focus_equals_stock(qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Files of a fit: keys with a transform and a center per kv head, values with one a layer, and rows of
    another size in every layer and side. Without windows, so that every token is read from them.
    """
    generator = torch.Generator().manual_seed(6)
    writer = DumpWriter(tmp_path / "dump", total_kv_heads=2)
    scales = torch.logspace(-0.5, 0.5, 64)
    heads = json.loads((qwen3 / "config.json").read_text())["num_attention_heads"]
    for layer in range(3):
        q, k, v = (torch.randn(700, n, 64, generator=generator) * scales for n in (heads, 2, 2))
        writer.write(layer, 1, q.bfloat16(), (k + 2).bfloat16(), v.bfloat16(), [400, 300])
    fitted = fit_focus(tmp_path / "dump", OutputWeights(qwen3))
    key = with_bits(fitted.key, (3, 2, 4), SideCodes(KEY_ROWS))
    # The values of one layer are left exact.
    value = with_bits(fitted.value, (2, 16, 3), SideCodes(VALUE_ROWS))
    replace(fitted, key=key, value=value).save(tmp_path, (".safetensors",))
    files = {"K": "k_rotation_focused_u_h_br.safetensors", "V": "v_rotation_balanced_u_h_br.safetensors"}
    env = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(tmp_path / name) for side, name in files.items()}
    env |= LOSSLESS | STRICT | {"SGLANG_OSCAR_RECIPE": "focus", "SGLANG_ENABLE_MIXED_KV_WINDOWS": "0"}
    with serve(qwen3, tmp_path / "log", *INT2, "--chunked-prefill-size", "128", env=env) as server:
        assert "bits by layer: keys 2 to 4, values 2 to 16" in server.text()
        for _ in range(2):
            assert_same(expected, ask(server, prompts(PROMPTS), workers=4), NEAR_TIE, DRIFT)
        assert server.alive()


def test_both_sides_left_exact_equal_stock(qwen3: Path, expected: list[dict], tmp_path: Path) -> None:
    """Rows of 16 bits as the codec writes them are those of a BF16 cache: nothing is rotated, nothing is rounded.

    Without overlap scheduling and prefix cache: SGLang has other code for both.
    """
    env = LOSSLESS | HADAMARD | STRICT | {"LOSSLESS_ROWS_OF_THE_CODEC": "1"}
    env |= {"SGLANG_OSCAR_K_BITS": "16", "SGLANG_OSCAR_V_BITS": "16"}
    args = ["--chunked-prefill-size", "128", "--disable-overlap-schedule", "--disable-radix-cache"]
    with serve(qwen3, tmp_path / "log", *INT2, *args, env=env) as server:
        assert "16.00 bits per element; bits by layer: keys 16, values 16" in server.text()
        for _ in range(2):
            assert_same(expected, ask(server, prompts(PROMPTS), workers=4), NEAR_TIE, DRIFT)
        assert server.alive()


def test_poison_is_seen(qwen3: Path, tmp_path: Path) -> None:
    """The check can fail: with windows that attention believes to be smaller than the poisoned ones, requests break."""
    broken = LOSSLESS | HADAMARD | {"LOSSLESS_ROWS_IGNORE_WINDOWS": "1"}
    with serve(qwen3, tmp_path / "log", *INT2, env=broken) as server:
        with pytest.raises(requests.HTTPError):
            ask(server, prompts(PROMPTS)[:3], workers=1, tokens=4)
        assert "the model's output is not a number (NaN)" in server.text()
