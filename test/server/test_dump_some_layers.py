"""Dumps of models that keep an INT2 cache in some layers only: gpt-oss and Qwen3-Next, by one rank and by two.

Layers of a dump are numbered from 0, whatever they are in the model; its manifest and the files fitted to it name them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from oscar_rotation.dump import DumpReader
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.math.attention import attention_outputs
from oscar_rotation.recipes.paper import fit
from sglang_oscar.errors import EXIT_CODE
from support import hybrid_models
from support.compare import LOGPROBS, assert_same
from support.launch_cases import run_cases
from support.models import COMMON as SHAPE
from support.models import save
from support.servers import STRICT, TWO_CORES, TWO_RANKS, Server, serve, server_environment

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks on two CPU cores"),
]
SUPPORT = Path(__file__).parents[1] / "support"
FULL = (1, 3)
"""Layers of both models that have an INT2 cache."""
LENGTHS = [300, 37, 420, 181, 260]
TWO = [*TWO_RANKS, "--skip-tokenizer-init"]
GPT_OSS = ["--moe-runner-backend", "triton", "--enable-fp32-lm-head"]
INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--max-running-requests", "2"]
TOKENS = 12
NOISE = 0.05
"""Of BF16 activations, relative: sums of two ranks are rounded by halves, and layers pass it on."""
NEAR_TIE = DRIFT = 0.12
"""Of answers with transforms: 16-bit windows are rounded in another basis than stock's."""


def prompts() -> list[list[int]]:
    rng = random.Random(17)
    return [rng.choices(range(250), k=length) for length in LENGTHS]


def plugins(*names: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(str(SUPPORT / name) for name in names)}


def answers(server: Server) -> list[dict[str, Any]]:
    return [server.generate(ids, TOKENS, **LOGPROBS) for ids in prompts()]


def dump(model: Path, folder: Path, *args: str, env: dict[str, str]) -> DumpReader:
    """What an ordinary server dumps of the prompts, which come one after the other: a chunk each."""
    variables = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": str(sum(LENGTHS)), "DUMP_KVCACHE_DIR": str(folder)}
    with serve(model, folder.with_suffix(".log"), *args, env=env | variables, warm_up=True) as server:
        for ids in prompts():
            server.generate(ids, 1)
        assert "dump complete" in server.text()
    found = DumpReader(folder)
    assert found.manifest is not None
    assert found.manifest.layer_ids == FULL
    assert [found.seq_lens(1, chunk) for chunk in found.fit_chunks()] == [(length,) for length in LENGTHS]
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: object, noise: float = NOISE) -> None:
    """Every head, channels together."""
    difference = (found.float() - expected.float()).norm(dim=(0, 2)) / expected.float().norm(dim=(0, 2))
    assert float(difference.max()) < noise, f"{what}: {difference.tolist()}"


Seen = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


@contextmanager
def recorded(model: Path) -> Iterator[tuple[Any, Seen]]:
    """A gpt-oss model of transformers, and queries, keys, values and outputs of its attention, [tokens, heads, d]."""
    seen: Seen = []
    eager = modeling_gpt_oss.eager_attention_forward

    def note(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = eager(module, q, k, v, *args, **kwargs)
        seen.append((*(x[0].transpose(0, 1) for x in (q, k, v)), out[0][0]))
        return out

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gpt_oss, "eager_attention_forward", note)
        yield loaded, seen


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "model")


@pytest.fixture(scope="module")
def two_ranks(gpt_oss: Path) -> DumpReader:
    """The dump of gpt-oss by two ranks."""
    args = ["--attention-backend", "intel_amx", *GPT_OSS, *TWO]
    return dump(gpt_oss, gpt_oss.with_name("dump"), *args, env=plugins("gpt_oss_plugin") | TWO_CORES)


def test_dump_of_sliding_windows_and_sinks(gpt_oss: Path, two_ranks: DumpReader) -> None:
    """Activations of full layers are those of transformers, and with the sink logits give its attention outputs."""
    weights = load_file(gpt_oss / "model.safetensors")
    with recorded(gpt_oss) as (loaded, seen):
        for chunk, ids in zip(two_ranks.fit_chunks(), prompts(), strict=True):
            seen.clear()
            with torch.inference_mode():
                loaded(torch.tensor([ids]), use_cache=False)
            for number, layer in enumerate(FULL):
                found, (*expected, outputs) = two_ranks.load(number, chunk), seen[layer]
                for name, wanted in zip("qkv", expected, strict=True):
                    assert_close(getattr(found, name), wanted, (layer, name, len(ids)))
                sinks = two_ranks.sink_logits(number)
                assert sinks is not None
                assert torch.equal(sinks, weights[f"model.layers.{layer}.self_attn.sinks"].float())
                heads = found.k.shape[1]
                q = found.q.float().unflatten(1, (heads, -1)).transpose(0, 1)
                k, v = (x.float().transpose(0, 1) for x in (found.k, found.v))
                attended = torch.cat(list(attention_outputs(q, k, v, [len(ids)], 64**-0.5, sinks.view(heads, -1))), 1)
                # By kv head, then query head of its group, then token.
                by_head = attended.unflatten(1, (-1, len(ids))).flatten(0, 1).transpose(0, 1)
                assert_close(by_head, outputs, (layer, "attention", len(ids)))


@pytest.mark.parametrize(("recipe", "rows"), [("plus", "codes"), ("focus", "lossless")])
def test_fit_of_sliding_windows_serves(
    recipe: str, rows: str, gpt_oss: Path, two_ranks: DumpReader, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """``oscar fit`` names the layers that have an INT2 cache, and a server takes the files.

    Where rows are lossless, answers are those of stock: transforms and centers leave attention with sinks as it is.
    """
    command = [sys.executable, "-m", "oscar_tools", "fit", str(two_ranks.root), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--recipe", recipe],
        env=server_environment({}),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rotary embedding is not known" not in done.stdout + done.stderr
    files = [next(tmp_path.glob(f"{side}_rotation_*.safetensors")) for side in "kv"]
    for path in files:
        assert read_rotation_file(path).layer_ids == FULL
    env = plugins("gpt_oss_plugin", *(["lossless_plugin"] if rows == "lossless" else [])) | STRICT
    env |= {"SGLANG_OSCAR_K_ROTATION_PATH": str(files[0]), "SGLANG_OSCAR_V_ROTATION_PATH": str(files[1])}
    with serve(gpt_oss, tmp_path / "log", *INT2, *GPT_OSS, "--skip-tokenizer-init", env=env) as server:
        found = [answers(server), answers(server)]
        assert all(str(path) in server.text() for path in files)
        assert server.alive()
    for answer in (*found[0], *found[1]):
        assert len(answer["output_ids"]) == TOKENS
        assert all(chosen[0] is not None for chosen in answer["meta_info"]["output_token_logprobs"])
    if rows == "lossless":
        stock: list[dict[str, Any]] = request.getfixturevalue("stock_answers")
        for each in found:
            assert_same(stock, each, NEAR_TIE, DRIFT)


@pytest.fixture(scope="module")
def stock_answers(gpt_oss: Path) -> list[dict[str, Any]]:
    args = ["--attention-backend", "intel_amx", *GPT_OSS, "--skip-tokenizer-init"]
    with serve(gpt_oss, gpt_oss.with_name("stock"), *args, env=plugins("gpt_oss_plugin")) as server:
        return answers(server)


def test_two_ranks_of_a_hybrid_dump_what_one_does(tmp_path: Path) -> None:
    """All heads in their order, layer by layer; a fit finds the same covariances head by head."""
    model = hybrid_models.save("qwen3_next", tmp_path / "model")
    args = ["--attention-backend", "torch_native", "--skip-tokenizer-init", "--max-mamba-cache-size", "16"]
    one = dump(model, tmp_path / "one", *args, env={})
    two = dump(model, tmp_path / "two", *args, *TWO_RANKS, env=TWO_CORES)
    shape = (SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"])
    for found, ranks in ((one, 1), (two, 2)):
        assert found.manifest is not None
        assert (found.manifest.q_heads, found.manifest.kv_heads, found.manifest.tp_size) == (*shape, ranks)
    for layer in range(len(FULL)):
        for chunk in one.chunks:
            expected, dumped = one.load(layer, chunk), two.load(layer, chunk)
            for name in "qkv":
                assert_close(getattr(dumped, name), getattr(expected, name), (layer, chunk, name))
    # U and its eigenvalues are the covariance again, which noise changes little; U alone may turn within a subspace.
    options = FitOptions(share="kv_head", composition="plain")
    results = [fit(source, options, device="cpu") for source in (one, two)]
    for side, fitted in (("k", [x.key for x in results]), ("v", [x.value for x in results])):
        covariances = []
        for rotations in fitted:
            assert rotations.eigenvalues is not None
            assert rotations.rotations.shape == (len(FULL), shape[1], 64, 64)
            covariances.append(rotations.rotations * rotations.eigenvalues[..., None, :] @ rotations.rotations.mT)
        difference = (covariances[0] - covariances[1]).norm(dim=(2, 3)) / covariances[0].norm(dim=(2, 3))
        assert float(difference.max()) < NOISE, f"{side}: {difference.tolist()}"


def test_heads_that_sglang_adds_are_refused(tmp_path: Path) -> None:
    """On a CPU a kv head for two ranks is not copied: SGLang adds one, and query heads, that no model has."""
    cases = []
    for kv_heads in (1, 2):
        model = hybrid_models.save("qwen3_next", tmp_path / str(kv_heads), num_key_value_heads=kv_heads)
        argv = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"]
        cases += [{"argv": [*argv, "--tp-size", str(ranks)]} for ranks in (1, 2)]
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_DIR": str(tmp_path / "dump")}
    outcomes = run_cases(cases, server_environment(env))
    assert [outcome["status"] for outcome in outcomes] == [0, EXIT_CODE, 0, 0], outcomes
    assert "--tp-size 2 and a model of 4 query and 1 kv heads" in outcomes[1]["error"].splitlines()[-1]
