"""What a server runs before its first prompt: kernels of chunks behind cached prefixes, in rows that are nobody's."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from test_ragged_extend import TorchRagged
from test_sink_logits import HERE, SHAPE, kernels_of, layer_of

from oscar_kernels import ragged_extend
from oscar_kernels.extend_plan import Limits, cut_prefixes
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.triton import extend as extending
from oscar_kernels.triton.decode import decode
from sglang_oscar.attention import gpu, prompt_store, warm_up

LIMITS = Limits(capacity=50, passes=8, break_even=32, window=2240, joined=True)


@pytest.mark.parametrize("ragged", [True, False])
def test_every_kernel_runs_and_only_dummies_are_written(ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launched = layer_of(centered=True, device=HERE), []

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            launched.append(name)
            return call(*args, **options)

        return run

    for module, name in ((ragged_extend, "merge_states_"), (gpu, "rotate")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    for module, name in ((prompt_store, "store"), (extending, "extend")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    kernels: Any = kernels_of("triton", layer)
    attend = noted("decode", decode)
    if ragged:
        kernels._decode = attend
        planner = RaggedPlanner(SHAPE.format(), SHAPE.q_heads, SHAPE.dtype, LIMITS, HERE, TorchRagged)
        copy = noted("copy_prefixes", ragged_extend.copy_prefixes)
        kernels._ragged = ragged_extend.RaggedExtend(planner, attend, copy)
    before = {name: getattr(layer.cache, name).clone() for name in ("k_rows", "v_rows")}
    limits = LIMITS if ragged else None
    monkeypatch.setattr(warm_up, "LARGEST_CHUNK", 20)
    hits = warm_up.PrefixHits(SHAPE.page_size, limits, longest=200)
    warm_up.chunks_behind_prefixes(dummies_of(kernels, layer), hits)
    wanted = {"copy_prefixes", "merge_states_", "decode"} if ragged else {"extend"}
    assert set(launched) == wanted | {"rotate", "store"}
    # A chunk beside others and one that is joined with its prefix.
    assert launched.count("copy_prefixes") == (3 if ragged else 0)
    # A short chunk and a single token, and a short chunk alone.
    assert launched.count("decode") == (3 if ragged else 0)
    for name, rows in before.items():
        assert torch.equal(getattr(layer.cache, name)[SHAPE.page_size :], rows[SHAPE.page_size :])
    for name in ("k_ring", "v_ring", "k_sink", "v_sink"):
        assert getattr(layer.cache, name).isnan().all()


@pytest.mark.parametrize("break_even", [0, 1, 2, 3, 32, 400])
@pytest.mark.parametrize("window", [0, 2240])
def test_lengths_are_of_their_kinds(break_even: int, window: int) -> None:
    """Whatever a GPU's decode kernel is worth; where nothing is short there is no such chunk."""
    limits = Limits(capacity=65536, passes=8, break_even=break_even, window=window)
    cut = cut_prefixes(*warm_up.PrefixHits(256, limits).kinds(), limits)
    assert len(cut.passes) == 1
    assert cut.passes[0][0].request == 0
    assert 2 in cut.single
    assert cut.short == ([1] if break_even > 2 or (break_even == 2 and window == 0) else [])
    assert not cut.in_place


class Launches:
    """Stands in for a Triton kernel: notes what it would be compiled for, and runs nothing."""

    def __init__(self, seen: set[Any], name: str) -> None:
        self._seen, self._name = seen, name

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            pointers = tuple(x.dtype for x in args if isinstance(x, torch.Tensor))
            constants = (item for item in options.items() if item[0].isupper() or item[0] == "num_warps")
            self._seen.add((self._name, pointers, *sorted(constants, key=str)))

        return launch


KERNELS = {
    "decode": ("decode_kernel", "merge_kernel"),
    "extend": ("extend_kernel",),
    "finite": ("_finite_kernel",),
    "merge_states": ("_merge_states_kernel",),
    "prefix": ("_prefix_kernel",),
    "rotate": ("_rotate_kernel",),
    "sink_logits": ("_sinks_kernel",),
    "store": ("_store_kernel",),
}


@pytest.mark.parametrize(
    ("ragged", "sink_logits", "most"),
    [
        (True, False, 200),
        (True, True, 200),
        (False, False, 200),
        (False, True, 200),
        (True, False, 1),
        (True, False, 5),
    ],
)
def test_what_follows_compiles_nothing(
    ragged: bool, sink_logits: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix hits of all kinds and numbers, and none, up to so many requests and 4,000 tokens at once."""
    seen: set[Any] = set()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(importlib.import_module(f"oscar_kernels.triton.{module}"), name, Launches(seen, name))
    monkeypatch.setattr(TorchRagged, "forward_return_lse", nothing)
    layer = layer_of(centered=sink_logits, device=HERE)
    kernels: Any = kernels_of("triton", layer)
    if ragged:
        planner = RaggedPlanner(SHAPE.format(), SHAPE.q_heads, SHAPE.dtype, LIMITS, HERE, TorchRagged)
        kernels._ragged = ragged_extend.RaggedExtend(planner, decode)
    limits = LIMITS if ragged else None
    hits = warm_up.PrefixHits(SHAPE.page_size, limits, max_batch=most, longest=10_000)
    dummies = dummies_of(kernels, layer, sink_logits)
    warm_up.chunks_behind_prefixes(dummies, hits)
    warm_up.captured(dummies, ())
    warm, rng = set(seen), random.Random(3)
    assert {name for name, *_ in warm} >= {"_store_kernel", "extend_kernel", "_rotate_kernel", "_finite_kernel"}
    assert any(name == "_sinks_kernel" for name, *_ in warm) == sink_logits
    for number in range(60):
        count = rng.choice([count for count in (1, 2, 5, 30, 64, 65, 128, 129, 200) if count <= most])
        chunks = [rng.choice((1, 2, 3, 8, 20, 31)) for _ in range(count)] if number % 3 else [4000]
        prefixes = [(number % 5 > 0) * rng.choice((16, 200, 500, 2000)) for _ in chunks]
        if number % 20 == 4 and most >= 128:
            # One token more than the decode kernel takes at a time.
            prefixes, chunks = [2000] * 128, [2] * 127 + [3]
        elif number % 20 == 5:
            # As many tokens as the decode kernel takes of so few requests.
            prefixes, chunks = [9_900] * min(most, 9), [26] * min(most, 9)
        dummies.extend(prefixes, chunks)
        # Steps of decode are captured before a server answers.
        assert not {variant for variant in seen - warm if not is_of_a_step(variant)}, (prefixes, chunks)


def dummies_of(kernels: Any, layer: Any, sink_logits: bool = False) -> warm_up.Dummies:
    return warm_up.Dummies(kernels, [layer], SHAPE.page_size, SHAPE.q_heads, SHAPE.dtype, sink_logits)


def is_of_a_step(variant: tuple[Any, ...]) -> bool:
    """Chunks of one token decode, and do without log-sum-exps where nothing asks for them."""
    return variant[0] == "merge_kernel" and ("HAS_LSE", False) in variant


def nothing(self: Any, q: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.zeros(q.shape[:2])
