"""Models with sliding windows beside the INT2 cache: sizes, pools, who attends to what, which hits and which models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.load import load_rotation, recipe_rotation
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.disaggregation.waiting import WaitingRequests
from sglang_oscar.features.sliding_windows import attention, models, pool
from sglang_oscar.features.sliding_windows.attention import WindowsBesideInt2, attend_within
from sglang_oscar.features.sliding_windows.prefix_hits import around_free_out_of_window
from sglang_oscar.features.sliding_windows.sizing import pool_sizes
from sglang_oscar.features.sliding_windows.two_pools import around_from_server_args
from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory.plan import MemoryPlan, make_plan
from sglang_oscar.memory.pool import Int2TokenToKVPool

GPT_OSS_20B = Geometry.uniform(RowLayout(8, 64, 64), Windows(sink=64, recent=256, ring=256), torch.bfloat16, layers=12)
WINDOWS = WindowPool(((1024,) * 12,) * 2, torch.bfloat16, 127, 256, 64, 128, 16384)
FULL, SLIDING = (1, 3), (0, 2)


def config(architecture: str = "GptOssForCausalLM", **facts: Any) -> Any:
    """What is read of SGLang's ModelConfig."""
    known: dict[str, Any] = {
        "model_path": "/models/it",
        "is_hybrid_swa": True,
        "has_attention_sinks": True,
        "full_attention_layer_ids": list(FULL),
        "swa_attention_layer_ids": list(SLIDING),
        "num_hidden_layers": 4,
        "dtype": torch.bfloat16,
        "swa_head_dim": 64,
        "swa_v_head_dim": 64,
        "get_swa_num_kv_heads": lambda ranks: 2 // ranks,
    }
    hf_config = SimpleNamespace(architectures=[architecture])
    hf_config.get_text_config = lambda: hf_config
    return SimpleNamespace(hf_config=hf_config, linear_attn_registry_result=None, **known | facts)


def test_layers_in_two_bits() -> None:
    assert cached_layer_ids(config()) == FULL
    assert cached_layer_ids(config(is_hybrid_swa=False, full_attention_layer_ids=None)) == (0, 1, 2, 3)


def test_gpt_oss_20b() -> None:
    """A token of history takes 6.4 times less; the same memory holds more than four times what stock does."""
    plan = make_plan(GPT_OSS_20B, 60 * GIB, 64, 64, [WINDOWS])
    assert GPT_OSS_20B.cell_bytes == 3840
    full = (60 * GIB - plan.fixed_bytes) // plan.token_bytes // 64 * 64
    sizes = pool_sizes(plan, full, 64)
    assert sizes == {"full_max_total_num_tokens": full, "swa_max_total_num_tokens": 64 * 1280 + 16384}
    stock = 60 * GIB / (24576 + 0.8 * 24576)
    assert full > 4 * stock
    text = " ".join(plan.lines(full))
    assert "window layers: 12 in bfloat16, 24576 bytes a token x 98304 tokens" in text
    assert "3840 of full layers, 6.4 times less than in 16 bits" in text


@given(
    st.integers(1, 64), st.none() | st.floats(0.01, 1.0), st.integers(1, 4096), st.integers(0, 1024),
    st.sampled_from([16, 64, 128]), st.integers(1, 200),
)  # fmt: skip
def test_sizes_fit_the_budget(
    running: int, ratio: float | None, window: int, recent: int, page: int, gibibytes: int
) -> None:
    """Window buffers and both pools fit; every running request has its windows, or the operator's ratio holds."""
    windows = replace(WINDOWS, ratio=ratio, window=window, recent=recent, page_size=page)
    budget = gibibytes * GIB
    try:
        plan = make_plan(GPT_OSS_20B, budget, running, page, [windows])
        full = (budget - plan.fixed_bytes) // plan.token_bytes // page * page
        swa = pool_sizes(plan, full, page)["swa_max_total_num_tokens"]
    except (Int2Error, ValueError):
        return
    assert plan.window_bytes + full * GPT_OSS_20B.cell_bytes + swa * windows.token_bytes <= budget
    assert full % page == 0
    assert swa % page == 0
    if ratio is None:
        assert swa == full or swa >= running * (2 * (window + recent) + windows.interval)
    else:
        assert swa <= full * ratio < swa + page


def test_what_takes_a_budget_that_is_too_small() -> None:
    """Each part by name, with the flag that makes it less."""
    with pytest.raises(Int2Error, match=r"layers with a sliding window .*or --chunked-prefill-size, or raise"):
        make_plan(GPT_OSS_20B, GIB // 4, 4, 64, [WINDOWS])
    with pytest.raises(Int2Error, match=r"and 8 waiting ones take .*or --disaggregation-decode-extra-slots, or raise"):
        make_plan(GPT_OSS_20B, GIB // 64, 4, 64, [WaitingRequests(8)])


def paired(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's pair of pools, with the INT2 pool in it."""
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    layout = RowLayout(2, 64, 64)
    geometry = Geometry.uniform(layout, Windows(0, 0, 0), torch.bfloat16, 4)
    formats = {layer_id: geometry.formats[layer_id] for layer_id in FULL}
    int2 = Int2TokenToKVPool(
        256, formats=formats, page_size=64, device="cpu", enable_memory_saver=False, start_layer=0, end_layer=4
    )
    found = SimpleNamespace(attach=lambda kv_pool: setattr(kv_pool, "found", True))
    monkeypatch.setattr(pool, "cache_of", lambda of: found if of is int2 else None)
    sizes = SimpleNamespace(full_max_total_num_tokens=256, swa_max_total_num_tokens=128)
    configurator = SimpleNamespace(model_config=config(), pool_page_size=64, device="cpu")
    made = pool.pair_with_windows(configurator, sizes, int2)
    assert made.full_kv_pool is int2
    assert made.found
    return made


def test_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of full layers are bytes, windows in the model's dtype: what is stored there comes back bit by bit."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    both = paired(monkeypatch)
    assert {buffer.dtype for buffer in (*both.full_kv_pool.k_buffer, *both.full_kv_pool.v_buffer)} == {torch.uint8}
    assert {buffer.dtype for buffer in (*both.swa_kv_pool.k_buffer, *both.swa_kv_pool.v_buffer)} == {torch.bfloat16}
    assert len(both.swa_kv_pool.k_buffer) == len(SLIDING)
    k, v = torch.randn(2, 3, 2, 64).bfloat16()
    slots, window_slots = torch.tensor([200, 201, 202]), torch.tensor([70, 71, 72])
    both.set_kv_buffer(SimpleNamespace(layer_id=2), KVWriteLoc(slots, window_slots), k, v)
    assert torch.equal(both.get_key_buffer(2)[window_slots], k)
    assert torch.equal(both.get_value_buffer(2)[window_slots], v)
    assert not both.get_key_buffer(0).any()
    with pytest.raises(NotImplementedError):
        both.set_kv_buffer(SimpleNamespace(layer_id=1), KVWriteLoc(slots, window_slots), k, v)


class Recorded(AttentionBackend):
    """Writes down what it is asked for."""

    def __init__(self, name: str, calls: list[tuple[str, str, Any]]) -> None:
        super().__init__()
        self.name, self.calls = name, calls
        self.token_to_kv_pool = self.req_to_token_pool = None
        self.cache, self.max_context_len = SimpleNamespace(layers=dict.fromkeys(FULL)), 8192

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append((self.name, "init", forward_batch))

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> torch.Tensor:
        self.calls.append((self.name, "extend", (layer.layer_id, kwargs)))
        return q + 1

    forward_decode = forward_extend

    def refilling(self, blocks):
        self.calls.append((self.name, "refilling", blocks))
        return attention.contextmanager(lambda: (yield))()


def layer(layer_id: int) -> Any:
    return SimpleNamespace(
        layer_id=layer_id, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, head_dim=64, v_head_dim=64, scaling=0.1,
        sliding_window_size=5 if layer_id in SLIDING else -1,
    )  # fmt: skip


def test_every_layer_has_its_backend() -> None:
    """Layers with a window get what the stock backend says, bit by bit, with everything that the model passes on."""
    calls: list[tuple[str, str, Any]] = []
    both: Any = WindowsBesideInt2(Recorded("int2", calls), Recorded("stock", calls))  # type: ignore[arg-type]
    both.init_forward_metadata("batch")
    assert calls == [("int2", "init", "batch"), ("stock", "init", "batch")]
    q, sinks = torch.randn(3, 256), torch.randn(4)
    for forward in (both.forward_extend, both.forward_decode):
        for layer_id in range(4):
            calls.clear()
            assert torch.equal(forward(q, None, None, layer(layer_id), None, sinks=sinks), q + 1)
            assert calls == [("int2" if layer_id in FULL else "stock", "extend", (layer_id, {"sinks": sinks}))]


def test_refills_leave_windows_alone() -> None:
    """While sinks are computed again, layers with a window attend within the pass, each prompt to itself."""
    calls: list[tuple[str, str, Any]] = []
    both: Any = WindowsBesideInt2(Recorded("int2", calls), Recorded("stock", calls))  # type: ignore[arg-type]
    q, k, v = torch.randn(21, 256), torch.randn(21, 128), torch.randn(21, 128)
    batch, sinks = SimpleNamespace(extend_seq_lens_cpu=[9, 9]), torch.randn(4)
    with both.refilling([1, 2]):
        both.init_forward_metadata(batch)
        out = both.forward_extend(q, k, v, layer(0), batch, sinks=sinks)
        assert torch.equal(both.forward_extend(q, k, v, layer(1), batch, sinks=sinks), q + 1)
    assert [call[:2] for call in calls] == [("int2", "refilling"), ("int2", "init"), ("int2", "extend")]
    assert torch.equal(out, attend_within(q, k, v, layer(0), [9, 9], sinks))
    assert not out[18:].any()
    for token in range(18):
        seen = slice(max(token // 9 * 9, token - 5), token + 1)
        for head in range(4):
            channels = slice(head // 2 * 64, head // 2 * 64 + 64)
            logits = k[seen, channels].double() @ q[token, 64 * head : 64 * head + 64].double() * 0.1
            weights = torch.cat([logits, sinks[head : head + 1].double()]).softmax(0)[:-1]
            want = weights @ v[seen, channels].double()
            torch.testing.assert_close(out[token, 64 * head : 64 * head + 64].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("windows", [WINDOWS, None])
def test_requests_keep_what_the_next_hit_needs(windows: WindowPool | None) -> None:
    """In int2 mode with windows, more than SGLang would; elsewhere what it says."""
    rows, said = SimpleNamespace(), []
    rows.oscar_cache = SimpleNamespace(plan=MemoryPlan(GPT_OSS_20B, 1, 0, (windows,) if windows else ()))
    for holder in (rows, SimpleNamespace()):
        around_free_out_of_window(
            lambda req, pre_len, **kwargs: said.append(kwargs["sliding_window_size"]),
            "req", 1000, sliding_window_size=127, page_size=64, req_to_token_pool=holder,
        )  # fmt: skip
    assert said == [128 + 256 + 64 if windows else 127, 127]


@pytest.mark.parametrize(
    ("architecture", "facts", "reason"),
    [
        ("Llama4ForConditionalGeneration", {}, "iRoPE"),
        ("Gemma4ForCausalLM", {}, "heads of another size"),
        ("GptOssForCausalLM", {"is_hybrid_swa": False}, "drop --disable-hybrid-swa-memory"),
        ("NewForCausalLM", {"is_hybrid_swa": False}, "not been tried"),
    ],
)
def test_refused_by_name(architecture: str, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Int2Error, match=reason) as error:
        models.check(config(architecture, **facts))
    assert architecture in str(error.value)


@pytest.mark.parametrize("mode", ["int2", "auto"])
def test_two_pools_in_place_of_one(mode: str) -> None:
    """Of models whose layers SGLang keeps in one pool, in int2 servers; drafts and models without windows stay."""
    args = SimpleNamespace(kv_cache_dtype=mode)

    def made(architecture: str, **facts: Any) -> Any:
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        plain = {"is_draft_model": False, "is_hybrid_swa": False, "hf_text_config": SimpleNamespace(layer_types=kinds)}
        model = config(architecture, **plain | facts)
        return around_from_server_args(lambda server_args: model, args)

    olmo = made("Olmo2ForCausalLM")
    assert cached_layer_ids(olmo) == (2,)  # of four layers
    assert olmo.is_hybrid_swa == (mode == "int2")
    if mode == "int2":
        assert olmo.swa_attention_layer_ids == [0, 1, 3]
        assert olmo.full_attention_layer_ids == [2]
    assert not made("Olmo2ForCausalLM", hf_text_config=SimpleNamespace()).is_hybrid_swa
    assert not made("Olmo2ForCausalLM", is_draft_model=True).is_hybrid_swa
    assert not made("LlamaForCausalLM").is_hybrid_swa


def arguments(**changed: Any) -> Any:
    plain = {"device": "cpu", "speculative_algorithm": None, "enable_torch_compile": False, "chunked_prefill_size": 512}
    return SimpleNamespace(**plain | {"disaggregation_mode": "null"} | changed)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10}, "branch"),
        ({"enable_torch_compile": True}, "torch.compile"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "storage"),
        ({"chunked_prefill_size": -1}, "chunked prefill"),
        ({"chunked_prefill_size": 0}, "chunked prefill"),
    ],
)
def test_refused_arguments(changed: dict[str, Any], what: str) -> None:
    models.check(config(), arguments())
    models.check(config(), arguments(chunked_prefill_size=None))
    with pytest.raises(Int2Error, match=what):
        models.check(config(), arguments(**changed))
    models.check(config(is_hybrid_swa=False, has_attention_sinks=False), arguments(**changed))


def test_prefill_apart() -> None:
    """A request that waits for its prompt has sliding windows, too."""
    plans = [make_plan(GPT_OSS_20B, 60 * GIB, 8, 64, [WINDOWS, WaitingRequests(waiting)]) for waiting in (0, 4)]
    few, more = (pool_sizes(plan, 10**6, 64)["swa_max_total_num_tokens"] for plan in plans)
    assert more - few == 4 * WINDOWS.request_tokens
    assert "8 running requests and 4 waiting ones x 1280" in " ".join(plans[1].lines(10**6))


def test_files_of_some_layers(tmp_path: Path) -> None:
    """They say which, and fit a model with rows in those layers only."""
    path = tmp_path / "k.safetensors"
    rotations = replace(recipe_rotation("hadamard", num_layers=2, head_dim=64, side="k"), layer_ids=FULL)
    save_rotation_file(path, rotations)
    assert load_rotation(path, num_layers=2, head_dim=64, side="k", layers=FULL).ids == FULL
    for layers in (None, SLIDING):
        with pytest.raises(RotationFileError, match="holds layer 1 where the model has 0"):
            load_rotation(path, num_layers=2, head_dim=64, side="k", layers=layers)
    with pytest.raises(RotationFileError, match="safetensors"):
        save_rotation_file(tmp_path / "k.pt", rotations)
    for ids in ((3, 1), (1, 1), (1,), (-1, 2)):
        with pytest.raises(RotationFileError, match="layer ids"):
            save_rotation_file(path, replace(rotations, layer_ids=ids))


@pytest.mark.parametrize(("asked", "expected"), [(None, "triton"), ("fa3", "fa3")])
def test_windows_on_a_gpu_are_tritons_unless_told(
    asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.utils.is_cpu", lambda: False)
    args = SimpleNamespace(attention_backend=asked, prefill_attention_backend=None, decode_attention_backend=None)
    model = config()
    models.configure(args, config(is_hybrid_swa=False))
    assert args.attention_backend == asked
    models.configure(args, model)
    assert args.attention_backend == expected
