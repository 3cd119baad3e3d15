"""Ranks with batches of their own: hits without a sink block, what is refused, and how many requests run on each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.attach.arguments import replicas
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.ranks import arguments, cut_hits, stages
from sglang_oscar.formats.geometry import Geometry
from sglang_oscar.memory import sizing
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.logits_column import LogitsColumn
from sglang_oscar.requests import lifecycle, nan
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
    "enable_lora": None, "lora_paths": None, "pp_size": 1,
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


def test_what_does_not_go_with_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = PLAIN | {"pp_size": 2}
    arguments.configure(SimpleNamespace(**staged), None)
    with pytest.raises(Int2Error, match="data-parallel attention with pipeline parallelism; set --pp-size 1"):
        arguments.configure(SimpleNamespace(**staged | {"attn_dp_size": 2}), None)
    with pytest.raises(Int2Error, match="pipeline parallelism with speculative decoding; drop"):
        arguments.configure(SimpleNamespace(**staged | {"speculative_algorithm": "EAGLE"}), None)
    monkeypatch.setenv("SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM", "1")
    arguments.configure(SimpleNamespace(**PLAIN), None)
    with pytest.raises(Int2Error, match="pipeline parallelism without results of chunks; unset"):
        arguments.configure(SimpleNamespace(**staged), None)


def test_all_stages_hear_what_came_out() -> None:
    """The last one sends its logits with the tokens; on each, they lie beside the result that is processed, and beside
    the chunk that was noted when it ran."""
    rows = torch.tensor([1.0, float("nan")])
    last, tokens = stage_that_ran(column=LogitsColumn(rows, 1, on_device=rows)), {}
    stages.after_prepare_tensor_dict(tokens, None, last.result, last.batch)
    first = stage_that_ran(column=None)
    for stage in (first, last):
        assert stage.req.oscar_unread == [stage.chunk]
        result = SimpleNamespace()
        stages.after_prep_batch_result(result, None, stage.batch, None, SimpleNamespace(tensors=tokens))
        assert result.oscar_chunk is stage.chunk
        assert stage.chunk.broken
        assert result.oscar_logits.broken([1, 1]) == [1]
        again = SimpleNamespace()  # SGLang goes on with the same batch
        stages.after_prep_batch_result(again, None, stage.batch, None, SimpleNamespace(tensors=tokens))
        assert not hasattr(again, "oscar_chunk")


def stage_that_ran(column: LogitsColumn | None) -> Any:
    """A stage behind its pass over a chunk, which is the second of a batch; only the last one has logits."""
    made = small_cache(Windows(SINK, 8, 8), blocks=3)
    made.logits = column
    req, other = request(1), request(2)
    batch = SimpleNamespace(reqs=[other, req])
    result = SimpleNamespace(pp_hidden_states_proxy_tensors=object() if column is None else None)
    tree = SimpleNamespace(req_to_token_pool=made.req_to_token_pool)
    nan.after_run_batch(result, SimpleNamespace(tree_cache=tree, chunked_req=req), batch)
    return SimpleNamespace(result=result, batch=batch, req=req, chunk=req.oscar_unread[-1])


def test_stages_take_the_smallest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other numbers of sink blocks they would evict other ones."""
    geometry: Any = Geometry.uniform(RowLayout(2, 64, 64, torch.bfloat16), Windows(64, 256, 256), torch.bfloat16, 3)
    configurator = SimpleNamespace(server_args=None, page_size=64)
    monkeypatch.setattr(sizing, "geometry_of", lambda configurator: geometry)
    monkeypatch.setattr(sizing, "features", lambda: [])
    monkeypatch.setattr(sizing.releases, "resolved", lambda args: SimpleNamespace(**PLAIN | {"pp_size": 2}))
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: SimpleNamespace(max_running_requests=None))
    monkeypatch.setattr(sizing, "smallest", lambda own: min(own, 7))
    plan = sizing.plan_for(configurator, 1 << 30)
    assert (plan.max_running, plan.sink_blocks) == (7, 15)


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
