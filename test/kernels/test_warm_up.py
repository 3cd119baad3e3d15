"""What a server runs before its first prompt: kernels of chunks behind cached prefixes, in rows that are nobody's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ragged_extend import TorchRagged
from test_sink_logits import HERE, SHAPE, kernels_of, layer_of

from oscar_kernels import ragged_extend
from oscar_kernels.extend_plan import Limits, cut_prefixes
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.triton.decode import decode
from sglang_oscar.attention import gpu, warm_up

LIMITS = Limits(capacity=50, passes=8, break_even=32, window=2240, joined=True)


@pytest.mark.parametrize("ragged", [True, False])
def test_every_kernel_runs_and_only_dummies_are_written(ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launched = layer_of(centered=True, device=HERE), []

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            launched.append(name)
            return call(*args, **options)

        return run

    for module, name in ((ragged_extend, "copy_prefixes"), (ragged_extend, "merge_states_"), (gpu, "rotate")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    for name in ("store", "extend"):
        monkeypatch.setattr(gpu, name, noted(name, getattr(gpu, name)))
    kernels: Any = kernels_of("triton", layer)
    attend = noted("decode", decode)
    if ragged:
        kernels._decode = attend
        planner = RaggedPlanner(SHAPE.key_layout, SHAPE.q_heads, SHAPE.dtype, LIMITS, HERE, TorchRagged)
        kernels._ragged = ragged_extend.RaggedExtend(planner, attend)
    before = {name: getattr(layer.cache, name).clone() for name in ("k_rows", "v_rows")}
    limits = LIMITS if ragged else None
    warm_up.chunks_behind_prefixes(kernels, [layer], SHAPE.q_heads, SHAPE.dtype, SHAPE.page_size, limits)
    wanted = {"copy_prefixes", "merge_states_", "decode"} if ragged else {"extend"}
    assert set(launched) == wanted | {"rotate", "store"}
    # A chunk beside others and one that is joined with its prefix.
    assert launched.count("copy_prefixes") == (2 if ragged else 0)
    # A short chunk and a single token.
    assert launched.count("decode") == (2 if ragged else 0)
    for name, rows in before.items():
        assert torch.equal(getattr(layer.cache, name)[SHAPE.page_size :], rows[SHAPE.page_size :])
    for name in ("k_ring", "v_ring", "k_sink", "v_sink"):
        assert getattr(layer.cache, name).isnan().all()


@pytest.mark.parametrize("break_even", [0, 1, 2, 3, 32, 400])
@pytest.mark.parametrize("window", [0, 2240])
def test_lengths_are_of_their_kinds(break_even: int, window: int) -> None:
    """Whatever a GPU's decode kernel is worth; where nothing is short there is no such chunk."""
    limits = Limits(capacity=65536, passes=8, break_even=break_even, window=window)
    cut = cut_prefixes(*warm_up._kinds(256, limits), limits)
    assert len(cut.passes) == 1
    assert cut.passes[0][0].request == 0
    assert 2 in cut.single
    assert cut.short == ([1] if break_even > 2 or (break_even == 2 and window == 0) else [])
    assert not cut.in_place
