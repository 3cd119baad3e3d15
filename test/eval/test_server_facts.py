"""Reports about a server come from the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from oscar_tools.calibration.errors import HarnessError
from oscar_tools.evaluation.methods import make_method, running_method
from oscar_tools.evaluation.runner import started
from oscar_tools.evaluation.server_facts import ask, read
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory.facts import after_get_internal_state
from support.calibration import settings
from support.server_answers import INT2, answering, server_info


def test_a_stock_server_is_what_it_says() -> None:
    for dtype, title, bits in (
        ("auto", "BF16", 16.0),
        ("fp8_e4m3", "FP8 (e4m3)", 8.0),
        ("fp4_mystery", "fp4_mystery", None),
    ):
        facts = read(server_info(kv_cache_dtype=dtype))
        assert (facts.title, facts.bits, facts.int2) == (title, bits, None)
    assert read(server_info(dtype="float16")).title == "FP16"


def test_a_scheduler_in_int2_mode_adds_what_reports_state() -> None:
    geometry = Geometry.uniform(RowLayout(2, 128, 64), Windows(64, 256, 256), torch.bfloat16, layers=3)
    cache = SimpleNamespace(plan=SimpleNamespace(geometry=geometry), recipe="focus", fingerprint="f" * 64, kept=None)
    cache.settings = SimpleNamespace(recompute_recent=True)
    reply = SimpleNamespace(internal_state={"kv_cache_dtype": "int2"})
    after_get_internal_state(reply, SimpleNamespace(req_to_token_pool=SimpleNamespace(oscar_cache=cache)), None)
    facts = read(server_info(reply.internal_state["oscar"]))
    assert facts.title == "INT2, recipe focus"
    assert facts.bits == pytest.approx(2.5 + 16 * 320 / 131072)
    assert facts.int2 is not None
    assert facts.int2["fingerprint"] == "f" * 64
    assert [facts.int2[name] for name in ("group_sizes", "sink", "recomputed", "bits")] == [[64], 64, 256, 2.5]
    stock = SimpleNamespace(internal_state={})
    after_get_internal_state(stock, SimpleNamespace(req_to_token_pool=SimpleNamespace()), None)
    assert stock.internal_state == {}


def test_who_does_not_say_is_told_in_one_line() -> None:
    with pytest.raises(HarnessError, match="does not say what its int2 cache is"):
        read(server_info(kv_cache_dtype="int2"))
    with pytest.raises(HarnessError, match=r"http://127\.0\.0\.1:9/server_info: not the answer of an SGLang server"):
        ask("http://127.0.0.1:9")
    with answering({"object": "list"}) as url, pytest.raises(HarnessError, match="KeyError: 'kv_cache_dtype'"):
        ask(url)


@pytest.mark.parametrize(
    ("info", "name", "title"),
    [
        (server_info(), "bf16", "BF16"),
        (server_info(kv_cache_dtype="fp8_e4m3"), "fp8_e4m3", "FP8 (e4m3)"),
        (server_info(INT2), "plus", "INT2, recipe plus"),
        (server_info(INT2 | {"recipe": "paper"}), "oscar", "INT2, recipe paper"),
        (server_info(INT2 | {"recipe": "hadamard"}), "hadamard", "INT2, recipe hadamard"),
    ],
)
def test_a_running_server_names_its_method(info: dict[str, Any], name: str, title: str) -> None:
    facts = read(info)
    assert (running_method(facts).name, running_method(facts, [name]).title) == (name, title)
    with pytest.raises(ValueError, match=rf"--methods naive: the running server is {name} .*drop --methods"):
        running_method(facts, ["naive"])


def test_a_server_that_was_started_for_something_else_is_not_counted() -> None:
    with answering(server_info()) as url:
        assert started(url, make_method("bf16", settings())).facts.title == "BF16"
        with pytest.raises(HarnessError, match="Naive INT2: the server says that its cache is BF16; see --server-args"):
            started(url, make_method("naive", settings()))
