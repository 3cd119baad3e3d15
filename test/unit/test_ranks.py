"""Ranks with batches of their own: hits without a sink block, what is refused, and how many requests run on each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oscar_kernels.cache import Windows
from sglang_oscar.attach.arguments import replicas
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.ranks import arguments, cut_hits
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.requests import lifecycle
from support.small_cache import small_cache

SINK = 4


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Int2Cache:
    made = small_cache(Windows(SINK, 8, 8), blocks=3)
    made.cuts_hits = True
    monkeypatch.setattr(cut_hits, "_cache", made)
    return made


def request(first: int, **fields: Any) -> Any:
    made = {
        "rid": str(first), "origin_input_ids": [first] * 9, "output_ids": [], "extra_key": None, "input_embeds": None,
        "positional_embed_overrides": None, "prefix_indices": [0] * 8, "lora_id": None,
    }  # fmt: skip
    return SimpleNamespace(**made | fields)


def test_a_hit_ends_with_its_sink_block(cache: Int2Cache) -> None:
    req = request(1)
    assert cut_hits.longest_hit(req, 9) == 0
    block = cache.sinks.acquire_private()
    cache.sinks.publish(block, cache.sink_key(req))
    assert cut_hits.longest_hit(req, 9) == 9
    assert cut_hits.longest_hit(request(1, extra_key="another"), 9) == 0
    cache.sinks.release(block)
    assert cut_hits.longest_hit(req, 9) == 9
    for _ in range(2):
        cache.sinks.acquire_private()
    assert cut_hits.longest_hit(req, 9) == 0


def test_blocks_of_hits_outlive_those_who_want_one(cache: Int2Cache) -> None:
    """In one batch: a fresh request, listed first, would take the idle block of the hit behind it."""
    hit, fresh = request(1), request(2, prefix_indices=[])
    block = cache.sinks.acquire_private()
    cache.sinks.publish(block, cache.sink_key(hit))
    cache.sinks.release(block)
    cache.sinks.acquire_private()
    blocks = lifecycle.acquire_blocks(cache, [fresh, hit])
    assert blocks[1] == block
    assert not hasattr(hit, "to_finish")
    assert "pinned" in fresh.to_finish.message


def test_nothing_is_ever_refilled(cache: Int2Cache) -> None:
    """A hit that lost its block all the same is ended, before any rank computes what others do not."""
    req = request(1)
    assert lifecycle.acquire_blocks(cache, [req]) == [0]
    assert "its sink block is gone" in req.to_finish.message
    assert not cache.refills


def test_other_servers_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small_cache(Windows(SINK, 8, 8), blocks=3)
    monkeypatch.setattr(cut_hits, "_cache", None)
    assert cut_hits.longest_hit(request(1), 9) == 9
    lifecycle.acquire_blocks(plain, [request(1)])
    assert len(plain.refills) == 1


PLAIN: dict[str, Any] = {
    "enable_dp_attention": False, "dp_size": 1, "attn_dp_size": 1, "speculative_algorithm": None,
    "enable_hierarchical_cache": False, "disaggregation_mode": "null", "enable_torch_compile": False,
    "enable_lora": None, "lora_paths": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 1),
        ({"dp_size": 2}, 1),
        ({"dp_size": 2, "enable_dp_attention": True}, 2),
        ({"attn_dp_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_replicas_of_attention(given: dict[str, Any], count: int) -> None:
    assert replicas(SimpleNamespace(**PLAIN | given)) == count


BESIDE: list[dict[str, Any]] = [
    {"speculative_algorithm": "NGRAM"},
    {"enable_hierarchical_cache": True},
    {"disaggregation_mode": "decode"},
    {"enable_torch_compile": True},
    {"enable_lora": True},
]


@pytest.mark.parametrize("given", BESIDE, ids=lambda given: next(iter(given)))
def test_what_does_not_go_with_ranks_of_their_own(given: dict[str, Any]) -> None:
    arguments.configure(SimpleNamespace(**PLAIN | given), None)
    with pytest.raises(Int2Error, match=r"does not support data-parallel attention with .*; drop --"):
        arguments.configure(SimpleNamespace(**PLAIN | given | {"attn_dp_size": 2}), None)


def test_models_that_were_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "linear_config", lambda model: model.linear)
    monkeypatch.setattr(arguments, "window_layer_ids", lambda model: model.windows)
    plain, alone = {"linear": None, "windows": (), "is_multimodal": False}, SimpleNamespace(**PLAIN)
    args = SimpleNamespace(**PLAIN | {"attn_dp_size": 2})
    settings: Any = SimpleNamespace(kept_windows=0)
    arguments.check(args, settings, SimpleNamespace(**plain))
    for one in ({"linear": 1}, {"windows": (0,)}, {"is_multimodal": True}):
        model: Any = SimpleNamespace(**plain | one)
        arguments.check(alone, settings, model)
        with pytest.raises(Int2Error, match="does not support data-parallel attention with"):
            arguments.check(args, settings, model)
    keeps: Any = SimpleNamespace(kept_windows=8)
    with pytest.raises(Int2Error, match=r"SGLANG_OSCAR_KEPT_WINDOWS .*; unset it"):
        arguments.check(args, keeps, SimpleNamespace(**plain))
