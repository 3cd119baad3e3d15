"""Draft models with prefill and decode on servers of their own: as many drafts are accepted as on one server.

A draft model whose own rows did not arrive would change no answer, and draft badly. Rows are lossless, and NaN where a
window must be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from support import draft_models
from support.compare import assert_same
from support.disaggregated import ENVIRONMENT, Pair, backend_params, over, serve_pair
from support.releases import installed
from support.servers import HADAMARD, STRICT, serve
from support.speculation import DRIFT, INT2, NEAR_TIE, SMALL, TOKENS, ask, plugins, prompts

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="lossless rows exist in the CPU reference only"),
    pytest.mark.skipif(installed() != "0.5.23", reason="served from SGLang 0.5.23"),
]
ENV = plugins("lossless_plugin", "no_gpu_plugin") | HADAMARD | STRICT | SMALL
PAGES = ("--page-size", "16")
CHUNKS = ("--chunked-prefill-size", "128")
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}


class Models(NamedTuple):
    """A model, and draft models for it."""

    model: Path
    eagle: Path
    eagle3: Path


def chain(algorithm: str, steps: int, drafts: Path | None = None) -> list[str]:
    path = [] if drafts is None else ["--speculative-draft-model-path", str(drafts)]
    args = ["--speculative-algorithm", algorithm, "--speculative-num-steps", str(steps)]
    return [*args, "--speculative-eagle-topk", "1", *path]


def steps(answers: list[dict]) -> list[int]:
    """Steps of verification of each answer: the fewer, the more drafts were accepted."""
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(*draft_models.llama_with_drafts(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def expected(models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What one server answers with EAGLE's drafts."""
    log = tmp_path_factory.mktemp("one") / "log"
    with serve(models.model, log, *INT2, *PAGES, *chain("EAGLE", 7, models.eagle), env=ENV) as server:
        return ask(server, prompts(), workers=4)


@pytest.fixture(scope="module", params=backend_params())
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(models: Models, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, drafts = tmp_path_factory.mktemp("pair"), chain("EAGLE", 7, models.eagle)
    with serve_pair(models.model, folder, *INT2, *PAGES, *drafts, backend=backend, env=ENV, prefill=CHUNKS) as two:
        yield two


def test_as_many_drafts_are_accepted(pair: Pair, expected: list[dict]) -> None:
    """One after the other, then twelve at a time with chunked prompts and hits on the prefill server."""
    for workers in (1, 12):
        answers = ask(pair, prompts(), workers)
        assert_same(expected, answers, NEAR_TIE, DRIFT)
        assert steps(answers) == steps(expected)
    assert max(answer["meta_info"]["cached_tokens"] for answer in answers) >= 512
    assert min(steps(expected)) < TOKENS / 4
    assert pair.prefill.alive()
    assert pair.decode.alive()


def test_a_draft_layer_of_the_model(backend: str, tmp_path: Path) -> None:
    """Its rows follow those of a model with other layers."""
    model, drafts = draft_models.glm_with_draft_layer(tmp_path / "glm"), chain("NEXTN", 3)
    with serve(model, tmp_path / "one", *INT2, *drafts, env=ENV) as server:
        alone = ask(server, prompts(), workers=4)
    with serve_pair(model, tmp_path, *INT2, *drafts, backend=backend, env=ENV) as pair:
        answers = ask(pair, prompts(), workers=4)
    assert_same(alone, answers, NEAR_TIE, DRIFT)
    assert steps(answers) == steps(alone)
    assert max(steps(alone)) < TOKENS / 1.5


def test_wrong_drafts(models: Models, backend: str, expected: list[dict], tmp_path: Path) -> None:
    """Next to all of EAGLE3's are rejected."""
    drafts = chain("EAGLE3", 3, models.eagle3)
    with serve_pair(models.model, tmp_path, *INT2, *PAGES, *drafts, backend=backend, env=ENV, prefill=CHUNKS) as pair:
        answers = ask(pair, prompts(), workers=12)
    assert_same(expected, answers, NEAR_TIE, DRIFT)
    assert min(steps(answers)) > TOKENS / 1.2


def test_drafts_go_on_behind_a_retraction(models: Models, backend: str, expected: list[dict], tmp_path: Path) -> None:
    """Rows of drafts are taken along, too; only the step that follows has nothing new to draft from."""
    served = (*INT2, *PAGES, *chain("EAGLE", 7, models.eagle))
    with serve_pair(models.model, tmp_path, *served, backend=backend, env=ENV, of_decode=RETRACTING) as pair:
        answers = ask(pair, prompts(), workers=12)
        retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", pair.decode.text())))
    assert_same(expected, answers, NEAR_TIE, DRIFT)
    assert 0 < retracted < sum(steps(expected)) / 10
    print(steps(expected), steps(answers), retracted)
    assert sum(steps(answers)) <= sum(steps(expected)) + retracted


@pytest.mark.parametrize("other", ["weights", "tokens", "none"])
def test_servers_that_draft_otherwise_are_refused(
    pair: Pair, models: Models, backend: str, tmp_path: Path, other: str
) -> None:
    """By name, before anything is sent; the prefill server goes on."""
    trained = draft_models.trained(models.eagle, tmp_path / "eagle")
    drafts = {"weights": chain("EAGLE", 7, trained), "tokens": chain("EAGLE", 6, models.eagle), "none": []}[other]
    alone = (*INT2, *PAGES, *drafts, "--disaggregation-mode", "decode", *over(backend))
    with (
        serve(models.model, tmp_path / "log", *alone, env=ENV | ENVIRONMENT) as decode,
        ThreadPoolExecutor(1) as pool,
    ):
        request = pool.submit(Pair(pair.prefill, decode, pair.port).ask_decode, prompts()[-1], 4)
        assert request.exception(timeout=900) is not None
    line = next(line for line in decode.text().splitlines() if "KV cache dtype mismatch" in line)
    assert ", draft model " in line
    assert " with 8 tokens a step" in line
    assert pair.prefill.alive()
