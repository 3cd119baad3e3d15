"""The memory saver: what lies in the region that is released, and what it holds once it is back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache import memory_pool
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_kernels.cache import Windows
from oscar_kernels.codebook import Codebook
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import CODEBOOK
from oscar_kernels.transform import SideTransform
from sglang_oscar.attention import refill_pass
from sglang_oscar.features.resuming import feature as resuming
from sglang_oscar.features.resuming.resumed import Resumed
from sglang_oscar.features.sliding_windows.pool import pair_with_windows
from sglang_oscar.formats.geometry import GIB, Geometry
from sglang_oscar.memory import build, saver
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.feature import FEATURE
from sglang_oscar.memory.plan import make_plan
from sglang_oscar.requests import lifecycle
from sglang_oscar.settings import Settings
from support.small_cache import small_cache

HEADS, D, PAGE, TOKENS, SEATS = 2, 64, 16, 64, 3
BOOK = Codebook(torch.zeros(HEADS, D // 4, 256, 4, dtype=torch.int8), torch.ones(HEADS, D // 4))
KEYS = SideFormat(D, transform=SideTransform(torch.eye(D)), coding=CODEBOOK, codebook=BOOK)
FORMATS = {layer: LayerFormat(HEADS, D, KEYS, SideFormat(D)) for layer in range(2)}
GEOMETRY = Geometry(FORMATS, Windows(sink=8, recent=12, ring=12), torch.bfloat16)


class Recorder(TorchDispatchMode):
    """Writes down where the tensors lie that are made while it is entered."""

    def __init__(self, places: set[int]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.places.add(place(made))
        return made


class StandIn:
    """For SGLang's adapter, whose library needs a GPU."""

    enabled = True
    places: ClassVar[set[int]] = set()

    @classmethod
    def create(cls, enable: bool) -> StandIn:
        assert enable
        return cls()

    def region(self, tag: str) -> Recorder:
        assert tag == GPU_MEMORY_TYPE_KV_CACHE
        return Recorder(self.places)


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Int2Cache]:
    """The pool of a server with a memory saver, and its cache."""
    monkeypatch.setattr(StandIn, "places", set())
    monkeypatch.setattr(memory_pool, "TorchMemorySaverAdapter", StandIn)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=1, attn_tp_size=1))
    for name, stand_in in {
        "check_layers": lambda *args: None,
        "model_rotations": lambda *args: (FORMATS, "focus", None),
        "features": lambda: [FEATURE],
        "facts": lambda cache: {},
        "new_tokens": lambda args: 0,
        "releases": SimpleNamespace(resolved=lambda args: args),
    }.items():
        monkeypatch.setattr(build, name, stand_in)
    configurator = SimpleNamespace(
        device="cpu", model=None, pool_page_size=PAGE, layer_info=SimpleNamespace(start_layer=0, end_layer=2),
        model_config=SimpleNamespace(is_hybrid_swa=False, swa_attention_layer_ids=None),
        server_args=SimpleNamespace(enable_memory_saver=True),
    )  # fmt: skip
    requests = SimpleNamespace(req_to_token=torch.zeros(SEATS, 8, dtype=torch.int32))
    plan = make_plan(GEOMETRY, GIB, SEATS - 1, PAGE)
    pool = build.build_pool(configurator, plan, SimpleNamespace(max_total_num_tokens=TOKENS), requests)
    cache = cache_of(pool)
    assert cache is not None
    return pool, cache


def test_rows_and_windows_are_released_and_nothing_else(built: tuple[Any, Int2Cache]) -> None:
    """Graphs read matrices, points of books and tables after a release, too."""
    found = built[1]
    inside, outside = [], [found.seats.ring_start, found.seats.sink_block]
    for layer in found.layers.values():
        cache, key = layer.cache, layer.format.key
        inside += [cache.k_rows, cache.v_rows, cache.k_ring, cache.v_ring, cache.k_sink, cache.v_sink]
        assert key.codebook is not None
        outside += [key.transform.matrix, key.codebook.points]
    assert {place(tensor) for tensor in inside} <= StandIn.places
    assert not {place(tensor) for tensor in outside} & StandIn.places


class Requests:
    """For SGLang's request pool."""

    def clear(self) -> None:
        """It has forgotten all."""


def poisoned() -> tuple[Int2Cache, list[torch.Tensor]]:
    """A cache whose memory came back with anything in it, and that memory."""
    cache = small_cache(Windows(4, 8, 8), requests=Requests())
    lifecycle.observe(cache)
    memory = [cache.req_to_token_pool.req_to_token]
    memory += [group for of in cache.holdings.values() for group in of.units.groups]
    assert len(memory) == 4
    for tensor in memory:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
    return cache, memory


def first_request_behind(cache: Int2Cache, kv_pool: Any) -> None:
    """SGLang flushes, and later the first request gains a seat."""
    cache.req_to_token_pool.clear()
    next_request(cache, kv_pool)


def next_request(cache: Int2Cache, kv_pool: Any) -> None:
    batch = SimpleNamespace(reqs=[], req_to_token_pool=cache.req_to_token_pool, seq_lens_cpu=torch.zeros(0))
    batch.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: kv_pool)
    lifecycle.around_alloc_for_extend(lambda batch: None, batch)


@pytest.mark.parametrize("saves", [True, False])
def test_memory_that_is_back_is_as_at_start(saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(enable_memory_saver=saves)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: served)
    monkeypatch.setattr(saver, "releases", SimpleNamespace(resolved=lambda args: args))
    cache, memory = poisoned()
    windows = torch.full((8, 2, 4), float("nan"))
    pair = SimpleNamespace(swa_kv_pool=SimpleNamespace(k_buffer=[windows], v_buffer=[]))
    first_request_behind(cache, pair)
    assert [not tensor.any() for tensor in (*memory, windows)] == [saves] * 5
    cache.window_buffers.rings[0].fill_(1.0)
    first_request_behind(cache, pair)
    assert cache.window_buffers.rings[0].any() != saves
    cache.window_buffers.rings[0].fill_(1.0)
    next_request(cache, pair)
    assert cache.window_buffers.rings[0].all(), "requests are in it"


def test_a_rank_without_requests_reads_no_memory_as_it_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data-parallel attention it runs dummies beside the requests of others."""
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(enable_memory_saver=True))
    monkeypatch.setattr(saver, "releases", SimpleNamespace(resolved=lambda args: args))
    cache, memory = poisoned()
    cache.req_to_token_pool.clear()
    pool = SimpleNamespace()
    cache.attach(pool)

    def dummies(runner: Any, batch: Any) -> Any:
        assert not any(tensor.any() for tensor in memory)
        return SimpleNamespace(logits_output=None)

    refill_pass.around_model_forward(dummies, SimpleNamespace(token_to_kv_pool=pool), None)
    assert not cache.flushed


def test_copies_of_kept_windows_are_released(built: tuple[Any, Int2Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cache = built
    monkeypatch.setattr(resuming, "_resumed", None)
    cache.settings = Settings.from_env({"SGLANG_OSCAR_KEPT_WINDOWS": "4"})
    resuming.built(build.Built(None, None, pool, cache))
    assert isinstance(cache.resumed, Resumed)
    (copies,) = cache.resumed.copies
    assert copies.shape[1] == 4
    assert place(copies) in StandIn.places


def test_windows_of_layers_with_one_are_released(built: tuple[Any, Int2Cache]) -> None:
    """Older releases of SGLang would not."""
    model = SimpleNamespace(
        dtype=torch.bfloat16, swa_head_dim=D, swa_v_head_dim=D, swa_attention_layer_ids=[2, 3],
        full_attention_layer_ids=[0, 1],
        get_swa_num_kv_heads=lambda ranks: HEADS,
    )  # fmt: skip
    sizes = SimpleNamespace(full_max_total_num_tokens=TOKENS, swa_max_total_num_tokens=TOKENS)
    configurator = SimpleNamespace(model_config=model, pool_page_size=PAGE, device="cpu")
    both = pair_with_windows(configurator, sizes, built[0])
    assert {place(tensor) for tensor in both.swa_kv_pool.k_buffer} <= StandIn.places
