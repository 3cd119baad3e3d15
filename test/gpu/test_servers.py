"""Servers on the GPU give the CPU server's answers: through graphs, prefix hits, chunks, retraction and load.

Some are started on two and four GPUs, too; test_gpu_ranks.py has what is particular to several.
"""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch

from support import golden
from support.api import retracted
from support.compare import LOGPROBS, assert_same, first_difference
from support.fleet import EXTEND, FLEET, STOCK_KERNELS, Fleet, each, prompts_by_default
from support.gpu_answers import DRIFT, NEAR_TIE, compare, compare_many, healthy, right, uncertain
from support.servers import compiled_calls, refills
from support.speculation import per_step

LAYERS = 4
"""Of the reference model."""
WATCHED = r"gpu_checks: nan,(ranks,)?sync"
"""What a server says whose padded rows are NaN and that may not wait; several ranks are compared, too."""


@pytest.mark.uses("plain")
def test_conversations_through_graphs_and_prefix_hits(fleet: Fleet, expected: dict) -> None:
    server = fleet["plain"]
    wanted = expected["conversations"]
    got = golden.conversations(server, wanted)
    compare("conversations", wanted, got)
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        if number % 3 != 2 or first_difference(wanted[number - 2], got[number - 2]) is None:
            assert have["meta_info"]["cached_tokens"] == want["meta_info"]["cached_tokens"]
    assert sum(answer["meta_info"]["cached_tokens"] > 0 for answer in got) > len(golden.LENGTHS)
    text = server.text()
    assert re.search(r"Decode batch.*cuda graph: True", text)
    assert f"int2 extend: {prompts_by_default()}" in text
    assert ("int2 decode: CUDA" in text) == (torch.cuda.get_device_capability() == (9, 0))
    healthy(server)


@pytest.mark.uses("plain")
def test_64_at_once(fleet: Fleet, expected: dict) -> None:
    server = fleet["plain"]
    compare_many("64 at once", expected, golden.many(server, workers=64))
    running = [int(found) for found in re.findall(r"Decode batch, #running-req: (\d+)", server.text())]
    assert max(running) > 32
    healthy(server)


@pytest.mark.uses("chunked")
def test_chunked_prefill(fleet: Fleet, expected: dict) -> None:
    """Prefixes that are not in the radix tree but come from earlier chunks, several loads of the workspace long."""
    server = fleet["chunked"]
    compare("chunked", expected["chunked"], golden.conversations(server, expected["chunked"]))
    healthy(server)


@each("fa3", "fa3_on_2", "flashinfer")
def test_prompts_by_a_kernel_that_is_named(name: str, fleet: Fleet, expected: dict) -> None:
    """Chunks and several loads of the workspace, padded batches, and no step that waits."""
    server, (said, _) = fleet[name], STOCK_KERNELS[FLEET[name].env[EXTEND]]
    assert f"int2 extend: {said}" in server.text()
    assert re.search(WATCHED, server.text())
    compare(name, expected["chunked"], golden.conversations(server, expected["chunked"]))
    compare_many(name, expected, golden.many(server, workers=64))
    healthy(server, FLEET[name].ranks)


@pytest.mark.uses("mixed")
def test_mixed_batches(fleet: Fleet) -> None:
    """Prompts come in chunks together with requests that decode; SGLang mixes only without log probabilities."""
    server = fleet["mixed"]
    score = right(golden.many(server, workers=64, tokens=100, logprobs=False))
    print(f"mixed: {score} of 64 right")
    assert score >= 56
    healthy(server)


@pytest.mark.uses("triton")
def test_triton_kernels_only(fleet: Fleet, expected: dict) -> None:
    server = fleet["triton"]
    assert "int2 extend: Triton" in server.text()
    assert "int2 decode: Triton" in server.text()
    compare_many("triton", expected, golden.many(server, workers=16))
    healthy(server)


@each("by_layer", "by_layer_speculating", "by_layer_speculating_on_2", "by_layer_speculating_on_4")
def test_other_bits_in_every_layer(name: str, fleet: Fleet, expected: dict) -> None:
    """On Hopper the CUDA kernel reads the layers with codes, the Triton kernel those with a side of 16 bits."""
    server = fleet[name]
    compare(name, expected["by_layer"], golden.conversations(server, expected["by_layer"]))
    score = right(golden.many(server, workers=64))
    print(f"{name}: {score} of 64 right")
    assert score >= 56
    if torch.cuda.get_device_capability() == (9, 0):
        assert "int2 decode: CUDA kernel, Triton kernel in layers with keys or values of 16 bits" in server.text()
    healthy(server, FLEET[name].ranks)


@each("by_head", "by_head_on_2")
def test_other_bits_in_every_kv_head(name: str, fleet: Fleet) -> None:
    """Layers in two parts, through graphs and prefix hits; what pads them is NaN, and nothing waits."""
    server = fleet[name]
    for flush in (True, False):
        score = right(golden.many(server, workers=64, flush=flush))
        print(f"{name}: {score} of 64 right")
        assert score >= 56
    # The prompts fill eight passes, and again as hits a few.
    healthy(server, FLEET[name].ranks, passes=10)


@pytest.mark.uses("compiled")
def test_decoding_inside_torch_compile(fleet: Fleet, expected: dict) -> None:
    """One and two requests are compiled, a graph each, in which attention is an operator; 16 are not."""
    server = fleet["compiled"]
    compare("compiled", expected["conversations"], golden.conversations(server, expected["conversations"]))
    for workers in (2, 16):
        compare_many(f"compiled, {workers} at once", expected, golden.many(server, workers))
    text = server.text()
    calls = compiled_calls(text)
    if "Graph break" in text:  # SGLang's own layers, from 0.5.21 on: attention is in one graph of every layer
        assert set(calls) == {1}
        assert len(calls) >= LAYERS * 2
    else:
        assert calls == [LAYERS, LAYERS]
    healthy(server)


@each("plain", "flashinfer", "triton", "triton_extend", "triton_decode")
def test_any_load_gives_the_certain_digits(name: str, fleet: Fleet, expected: dict) -> None:
    """Batches of ever other sizes, prompts arriving while others decode: a race or a wrong row would show."""
    server, wrong = fleet[name], []
    for workers in (3, 16, 64, 7, 16, 32, 16, 64):
        wrong.append(uncertain(expected["many"], golden.many(server, workers, tokens=golden.DIGITS)))
    print(f"{name}: wrong digits {wrong}")
    assert not any(wrong)
    healthy(server)


@each("retract", "retract_on_2", "retract_on_4")
def test_retraction(name: str, fleet: Fleet, expected: dict) -> None:
    """A retracted request computes its newest tokens again, from a prefix in 2 bits: certain digits stay."""
    server = fleet[name]
    got = golden.many(server, workers=64)
    print(f"{name}: {retracted(server)} retractions, {right(got)} right")
    assert retracted(server) > 3
    assert uncertain(expected["many"], got) == {}
    # The prompts fill eight passes, and more than three retractions make one each.
    healthy(server, FLEET[name].ranks, passes=12)


@pytest.mark.uses("watched")
def test_padded_rows_are_harmless_and_no_step_waits(fleet: Fleet, expected: dict) -> None:
    """Dummy page, ring row and sink block are NaN before every pass; PyTorch raises where the backend waits."""
    server = fleet["watched"]
    assert re.search(WATCHED, server.text())
    compare("watched", expected["conversations"], golden.conversations(server, expected["conversations"]))
    # 3, 5 and 7 at once are padded to the next size of a graph.
    for workers in (3, 5, 7, 64):
        compare_many(f"watched, {workers} at once", expected, golden.many(server, workers))
    healthy(server)


@each("refilled", "refilled_on_2", "refilled_on_4")
def test_lost_sinks_are_computed_again(name: str, fleet: Fleet, expected: dict) -> None:
    """Four sink blocks, many beginnings: every document hits when it is asked about again, and new blocks are NaN."""
    server = fleet[name]
    compare_many(f"{name}, cold", expected, golden.many(server, workers=2))
    before = refills(server)
    again = golden.many(server, workers=2, flush=False)
    compare_many(f"{name}, hits", expected, again)
    # A hit leaves the recent window to be computed.
    long = [answer for answer in again if answer["meta_info"]["prompt_tokens"] >= 256 + 64]
    cached = [answer["meta_info"]["cached_tokens"] for answer in long]
    print(f"{name}: {refills(server)} blocks computed again, {before} of them cold; cached tokens {cached}")
    assert len(long) > 40
    assert min(cached) > 0
    assert refills(server) > before + 40
    healthy(server, FLEET[name].ranks)


@pytest.mark.uses("many_beginnings")
def test_a_thousand_beginnings_hit(fleet: Fleet) -> None:
    """As many conversations as the pool holds, sixteen sink blocks: a thousand of a thousand hit, and say the same.

    The first answers come from prompts that were exact as a whole, later ones from prefixes in 2 bits, which compare.
    """
    server, rng = fleet["many_beginnings"], random.Random(5)
    prompts = [[rng.randrange(3, 250) for _ in range(200)] for _ in range(1000)]

    def ask() -> list[dict[str, Any]]:
        with ThreadPoolExecutor(32) as pool:
            return list(pool.map(lambda ids: server.generate(ids, 4, **LOGPROBS), prompts))

    _, second, third = ask(), ask(), ask()
    cached = [answer["meta_info"]["cached_tokens"] for answer in second + third]
    print(f"many beginnings: {sum(map(bool, cached))} hits of 2000, {refills(server)} blocks computed again")
    assert min(cached) >= 128
    assert_same(second, third, NEAR_TIE, DRIFT)
    assert refills(server) > 1000
    healthy(server)


@each("speculating", "speculating_on_2", "speculating_on_4")
def test_speculation(name: str, fleet: Fleet, expected: dict) -> None:
    """Drafts that are right or wrong by plan, in trees, through graphs; what pads them is NaN, and nothing waits."""
    server = fleet[name]
    assert re.search(WATCHED, server.text())
    answers = golden.conversations(server, expected["conversations"])
    compare(name, expected["conversations"], answers)
    for workers in (3, 7, 64):
        answers += golden.many(server, workers)
        compare_many(f"{name}, {workers} at once", expected, answers[-64:])
    print(f"{name}: {per_step(answers):.2f} tokens a step")
    assert per_step(answers) > 1.5
    assert re.search(r"Decode batch.*cuda graph: True", server.text())
    healthy(server, FLEET[name].ranks)


@pytest.mark.uses("speculating_triton")
def test_speculation_in_triton_with_chunks_and_retraction(fleet: Fleet, expected: dict) -> None:
    server = fleet["speculating_triton"]
    compare("speculating, chunked", expected["chunked"], golden.conversations(server, expected["chunked"]))
    # Steps of several tokens are few, and so are those that retract: two rounds.
    for _ in range(2):
        got = golden.many(server, workers=64)
        print(f"speculating: {retracted(server)} retractions, {right(got)} right, {per_step(got):.2f} tokens a step")
        assert uncertain(expected["many"], got) == {}
    assert retracted(server) > 3
    healthy(server)


@pytest.mark.uses("broken_by_nan")
def test_nan_would_show(fleet: Fleet, expected: dict) -> None:
    server = fleet["broken_by_nan"]
    wrong = 0
    for (ids, _), want in zip(golden.prompts(range(1)), expected["many"], strict=False):
        try:
            wrong += server.generate(ids, 4)["output_ids"] != want["output_ids"][:4]
        except requests.RequestException:
            wrong += 1
    assert wrong > len(golden.LENGTHS) // 2


@pytest.mark.uses("broken_by_wait")
def test_waiting_would_show(fleet: Fleet) -> None:
    """The planted wait stops the server before it is ready, or at the first request."""
    try:
        fleet["broken_by_wait"].generate([5, 6, 7], 4)
    except Exception:  # whatever a dying server answers
        text = fleet.logs["broken_by_wait"].read_text()
        assert "called a synchronizing CUDA operation" in text
    else:
        raise AssertionError("nobody noticed that the backend waits")


@each("fp8_block", "fp8_tensor")
def test_fp8_weights(name: str, fleet: Fleet) -> None:
    """Beside projections in FP8 the answers are right."""
    server = fleet[name]
    score = right(golden.many(server, workers=16))
    print(f"{name}: {score} of 64 right")
    assert score >= 56
    healthy(server)
