"""Servers of every kind whose rows are left exact: over three turns their answers are those of stock SGLang.

Nothing is rounded to two bits, so a wrong sink, ring, state, draft or page shows in log probabilities. A kind that is
refused on a GPU is skipped, with the line that refuses it. On two GPUs a draft is accepted by each rank on its own.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from oscar_tools.local_server import ServerFailedError
from sglang_oscar.attach.releases import tells_kept_states_apart
from support import hybrid_models, models, vision_models
from support.api import from_host
from support.compare import LOGPROBS, assert_same, first_difference, largest_drift
from support.draft_models import glm_with_draft_layer, hybrid_with_draft_layer, llama_with_drafts
from support.fleet import checked
from support.gpu_answers import assert_ranks_agree
from support.servers import EXACT, STRICT, Server, ranked, serve
from support.speculation import per_step, with_plugins
from support.together import Together

INT2 = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--enable-cache-report"]
STOCK = ["--attention-backend", "triton" if torch.cuda.is_available() else "torch_native", "--disable-radix-cache"]
COMMON = ["--enable-fp32-lm-head", "--dtype", "bfloat16", "--max-running-requests", "32"]
IDS = ["--skip-tokenizer-init"]
NEAR_TIE = DRIFT = 0.15
"""In nats: kernels differ in the order of sums, and all sums are rounded to BF16, which on the CPU engine moves log
probabilities by up to 0.03. Rows of 4 bits move them by 0.14 in the first turn and part at gaps of 0.3."""
TURNS, TOKENS, PAGE = 3, 70, 64
TRAINED = os.environ.get("OSCAR_TEST_HYBRID", "")
"""Folder of a model that ``scripts/train_reference_model.py --preset hybrid`` has trained."""
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
LINEAR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
"""A key head of linear attention for each of four ranks."""
APART = ["--disable-shared-experts-fusion"]
"""With the shared expert among those that are chosen from, SGLang would ask for one more than there are."""
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}
"""As many experts as ranks, which SGLang wants; all are asked: rounding must not choose between them."""
WINDOWS = (*IDS, "--moe-runner-backend", "triton")
HOST_TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--max-total-tokens", "2560"]
Prompt = tuple[Any, list[str]]
"""Token ids or text, and images."""


@dataclass(frozen=True)
class Kind:
    """How servers of one kind are started: a model, arguments of both servers, and those of int2 mode by the model."""

    model: Callable[[Path], Path]
    args: tuple[str, ...] = ()
    int2: Callable[[Path], list[str]] = lambda model: []
    images: bool = False
    per_step: float = 0.0
    """Tokens of a step of verification at least; 0 without drafts."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """On four, two ranks each hold a copy of a kv head: the models have two."""
    plugins: tuple[str, ...] = ()
    """Test plugins of int2 mode's server."""
    parallel: bool = True
    """Whether its GPUs hold a part of every layer, and not layers of their own."""
    shared: bool = True
    """Whether its ranks attend for the same requests."""
    packages: tuple[str, ...] = ()
    """That it needs, and not every machine has."""


def drafting(algorithm: str, drafts: int, name: str = "") -> Callable[[Path], list[str]]:
    """Chains of ``drafts`` drafts, by the draft model ``name`` beside the model or by its own draft layer."""

    def flags(model: Path) -> list[str]:
        own = ["--speculative-draft-model-path", str(model.with_name(name))] if name else []
        steps = ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
        return ["--speculative-algorithm", algorithm, *own, *steps]

    return flags


def ngram(drafts: int) -> list[str]:
    """Drafts of what was said before; ``drafts`` counts the token that a step begins with."""
    return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(drafts)]


def states(model: Path) -> list[str]:
    """Of a hybrid model, which one release serves without overlap scheduling only."""
    overlap = [] if tells_kept_states_apart() else ["--disable-overlap-schedule"]
    return ["--max-mamba-cache-size", "96", "--mamba-track-interval", str(PAGE), *overlap]


def experts(folder: Path) -> Path:
    """A model whose tokens go to all experts: rounding must not choose between them."""
    return models.save("glm4_moe", folder, n_routed_experts=2)


def windows(folder: Path) -> Path:
    """gpt-oss, whose tokens go to all experts for the same reason."""
    return models.save("gpt_oss", folder, num_local_experts=4, num_experts_per_tok=4)


KINDS = {
    "dense": Kind(lambda folder: models.save("qwen3", folder), tuple(IDS)),
    "drafts": Kind(
        lambda folder: llama_with_drafts(folder)[0], tuple(IDS), drafting("EAGLE", 3, "eagle"), per_step=2.0
    ),
    # Hardly ever right: nearly all that is verified must leave no trace.
    "random_drafts": Kind(
        lambda folder: llama_with_drafts(folder)[0], tuple(IDS), drafting("EAGLE3", 3, "eagle3"), per_step=1.0
    ),
    # Trees of what was said before, here and in other requests: most is wrong, and none may see its siblings.
    "trees": Kind(
        lambda folder: models.save("qwen3", folder),
        tuple(IDS),
        lambda model: ngram(6),
        per_step=1.0,
    ),
    "draft_layer": Kind(glm_with_draft_layer, tuple(IDS), drafting("NEXTN", 1), per_step=1.5, ranks=(1, 2)),
    "images_qwen2_5": Kind(lambda folder: vision_models.save("qwen2_5_vl", folder), images=True, ranks=(1, 2)),
    "images_qwen3": Kind(lambda folder: vision_models.save("qwen3_vl", folder), images=True, ranks=(1, 2)),
    "windows": Kind(windows, WINDOWS),
    # Chains: models with sliding windows are served with no trees.
    "windows_drafts": Kind(
        windows,
        WINDOWS,
        lambda model: [*ngram(4), "--speculative-ngram-max-bfs-breadth", "1"],
        per_step=1.0,
        ranks=(1, 2),
    ),
    "windows_host_tier": Kind(windows, WINDOWS, lambda model: HOST_TIER, ranks=(1, 2), plugins=("late_host_plugin",)),
    "hybrid_next": Kind(
        lambda folder: hybrid_models.save("qwen3_next", folder, **LINEAR_HEADS, **FOUR_EXPERTS),
        tuple(IDS),
        states,
    ),
    "hybrid_3_5": Kind(
        lambda folder: hybrid_models.save("qwen3_5", folder, **LINEAR_HEADS),
        (),
        states,
    ),
    "hybrid_draft_layer": Kind(
        lambda folder: hybrid_with_draft_layer("qwen3_next", folder),
        tuple(IDS),
        lambda model: [*states(model), *drafting("NEXTN", 3)(model)],
        per_step=1.5,
        ranks=(1,),
    ),
    "hybrid_lazy_states": Kind(
        lambda folder: hybrid_with_draft_layer("qwen3_next", folder),
        tuple(IDS),
        lambda model: [*states(model), *drafting("NEXTN", 3)(model), *hybrid_models.LAZY],
        per_step=1.5,
        ranks=(1,),
    ),
    # As published and as the cookbook serves it: it sees images, drafts, and keeps states in host memory.
    "hybrid_3_6": Kind(
        lambda folder: hybrid_with_draft_layer("qwen3_5_moe", folder, **hybrid_models.QWEN3_6),
        (),
        lambda model: [*states(model), *drafting("NEXTN", 3)(model), *HOST_TIER, "--max-total-tokens", "1792"],
        images=True,
        per_step=1.5,
        ranks=(1, 2),
        plugins=("late_host_plugin",),
    ),
    "hybrid_trained": Kind(lambda folder: Path(TRAINED), tuple(IDS), states, ranks=(1,)),
    # Ranks have experts of their own, and hand each other activations in equal shares: odd chunks are padded.
    "experts": Kind(experts, (*IDS, *APART, "--ep-size", "2", "--moe-dense-tp-size", "1"), ranks=(2,)),
    # Ranks have requests of their own, and pad their batches to each other's sizes.
    "experts_attended_apart": Kind(
        experts, (*IDS, *APART, "--dp-size", "2", "--enable-dp-attention"), ranks=(2,), shared=False
    ),
    # A library of its own hands tokens to experts, and wants real sizes.
    "experts_deepep": Kind(
        lambda folder: models.save("glm4_moe", folder, hidden_size=2048, moe_intermediate_size=256, n_routed_experts=2),
        (*IDS, *APART, "--moe-a2a-backend", "deepep", "--moe-runner-backend", "deep_gemm", "--moe-dense-tp-size", "1"),
        ranks=(2,),
        packages=("deep_ep", "deep_gemm"),
    ),
    "stages": Kind(
        lambda folder: models.save("qwen3", folder),
        (*IDS, "--pp-size", "2"),
        ranks=(2,),
        parallel=False,
    ),
    "host_tier": Kind(
        lambda folder: models.save("qwen3", folder),
        tuple(IDS),
        # A pool for three of the conversations.
        lambda model: HOST_TIER,
        # Rows from the host are NaN until somebody has waited for them.
        plugins=("late_host_plugin",),
    ),
}


def ask(server: Server, prompts: list[Prompt], workers: int) -> list[dict[str, Any]]:
    """Answers, ``workers`` at a time."""

    def one(prompt: Prompt) -> dict[str, Any]:
        said, images = prompt
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"text" if isinstance(said, str) else "input_ids": said, "sampling_params": sampling} | LOGPROBS
        body |= {"image_data": images} if images else {}
        reply = requests.post(f"{server.url}/generate", json=body, timeout=1500)
        reply.raise_for_status()
        return reply.json()

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, prompts))


def opening(images: bool) -> list[Prompt]:
    """First turns: of many lengths, some that part behind a common beginning; or of one text below different images."""
    rng = random.Random(5)
    if images:
        question = "".join(rng.choices(LETTERS, k=400))
        sizes = [(320, 256), (320, 256), (256, 320), (96, 64)]
        seen = [vision_models.image(seed, *size) for seed, size in enumerate(sizes)]
        return [(vision_models.IMAGE + question, [image]) for image in seen] + [(question, [])]
    common = rng.choices(range(250), k=420)
    alone = [rng.choices(range(250), k=length) for length in (1, 40, 63, 64, 130, 333, 600, 700)]
    return [(ids, []) for ids in alone + [common + rng.choices(range(250), k=length) for length in (90, 150, 30)]]


def next_turn(prompts: list[Prompt], answers: list[dict[str, Any]], seed: int) -> list[Prompt]:
    """The same conversations with an answer and some more; text goes on with text, as answers may be no letters."""
    rng, following = random.Random(seed), []
    for (said, images), answer in zip(prompts, answers, strict=True):
        count = rng.randrange(20, 150)
        if isinstance(said, str):
            following.append((said + "".join(rng.choices(LETTERS, k=count)), images))
        else:
            following.append((said + answer["output_ids"] + rng.choices(range(250), k=count), images))
    return following


def cases() -> list[Any]:
    """Every kind with every number of ranks that it is served with."""
    made = []
    for name, kind in KINDS.items():
        for ranks in kind.ranks:
            marks = [pytest.mark.skipif(0 < torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")]
            if name == "hybrid_trained":
                marks.append(pytest.mark.skipif(not TRAINED, reason="OSCAR_TEST_HYBRID names no trained hybrid model"))
            made.append(pytest.param(name, ranks, marks=marks, id=name if ranks == 1 else f"{name}_on_{ranks}"))
    return made


@pytest.mark.parametrize(("name", "ranks"), cases())
def test_answers_are_those_of_stock(name: str, ranks: int, tmp_path: Path) -> None:
    kind = KINDS[name]
    for package in kind.packages:
        pytest.importorskip(package, exc_type=ImportError)
    model = kind.model(tmp_path / "model")
    both = [*COMMON, *kind.args, *(ranked(ranks) if kind.parallel else [])]
    env = EXACT | STRICT | (checked("ranks", "padding") if ranks > 1 and kind.parallel else {})
    env = with_plugins(env, *kind.plugins)
    own = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"} if kind.packages else {}  # minutes, for sizes that no test asks for
    starts = {
        "int2": partial(serve, model, tmp_path / "log", *INT2, *both, *kind.int2(model), env=env | own),
        "stock": partial(serve, model, tmp_path / "stock", *STOCK, *both, env=own),
    }
    with Together(starts) as servers:
        try:
            server = servers["int2"]
        except ServerFailedError as error:
            if refused := re.search(r"error: (.* on a GPU.*)", str(error)):
                pytest.skip(refused[1])
            raise
        turns: list[tuple[list[Prompt], list[dict[str, Any]]]] = []
        prompts = opening(kind.images)
        for turn in range(TURNS):
            turns.append((prompts, ask(server, prompts, workers=1 + turn * 4)))
            prompts = next_turn(prompts, turns[-1][1], seed=turn)
        hits = [answer["meta_info"]["cached_tokens"] for answer in turns[-1][1]]
        assert sum(hit >= PAGE for hit in hits) > len(hits) // 2, hits
        server.flush()
        check_kind(name, ranks, server, [answer for _, answers in turns for answer in answers])
        for number, (prompts, answers) in enumerate(turns):
            expected = ask(servers["stock"], prompts, workers=2)
            print(f"{name} on {ranks}, turn {number}: drift {max(map(largest_drift, expected, answers)):.3f}")
            assert_same(expected, answers, NEAR_TIE, DRIFT)
            if kind.images and number == 0:
                for x, y in itertools.combinations(expected, 2):
                    assert first_difference(x, y), "images do not show in the answers"


def test_who_does_not_wait_for_the_host_is_seen(tmp_path: Path) -> None:
    """The check can fail: attention that does not wait reads rows that are not there yet."""
    env = with_plugins(EXACT | {"LATE_HOST_NOBODY_WAITS": "1"}, "late_host_plugin")
    model, args = models.save("qwen3", tmp_path / "model"), [*INT2, *COMMON, *IDS, *HOST_TIER]
    with serve(model, tmp_path / "log", *args, env=env) as server:
        prompts = [prompt for prompt in opening(images=False) if len(prompt[0]) > 300]
        ask(server, prompts, workers=1)
        with pytest.raises(requests.HTTPError):
            ask(server, prompts, workers=1)
        assert "the model's output is not a number (NaN)" in server.text()


def check_kind(name: str, ranks: int, server: Server, answers: list[dict[str, Any]]) -> None:
    """Nothing broke, ranks agree, and what a kind of server is there for has happened."""
    assert server.alive()
    text = server.text()
    assert "Traceback" not in text
    if ranks > 1 and KINDS[name].parallel and KINDS[name].shared:
        assert_ranks_agree(text, ranks, passes=2 * TURNS)
    if not KINDS[name].shared:
        assert all(f"DP{rank} TP{rank}] Prefill batch" in text for rank in range(ranks))
    if KINDS[name].per_step:
        print(f"{name}: {per_step(answers):.2f} tokens a step")
        assert per_step(answers) >= KINDS[name].per_step
    if name == "experts":
        assert "gpu_checks: padded extend" in text
    if "late_host_plugin" in KINDS[name].plugins:
        assert sum(from_host(answers)) > 1000
    if torch.cuda.is_available():
        assert re.search(r"Decode batch.*cuda graph: True", text)
