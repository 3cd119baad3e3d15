"""Which kernel stores the tokens of a step, and which those of a prompt's chunk."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import StoreSlots
from oscar_kernels.codebook import Codebook
from oscar_kernels.cuda import prompt
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from sglang_oscar.attention import gpu, prompt_store
from sglang_oscar.attention.prompt_store import PromptStore
from sglang_oscar.features.refitting.in_place import pairs, put
from sglang_oscar.memory.layer import CachedLayer

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from kernel_cases import Shape, empty_cache, random_rotation

POINTS = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
SHARED = Codebook.from_shared(POINTS, torch.ones(2, 16))
OWN = Codebook.from_points(torch.randn(2, 16, 256, 4, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("book", "tokens", "kernel"),
    [
        (None, 128, "step"),
        (None, 129, "prompt"),
        (OWN, 129, "prompt"),
        (SHARED, 129, "step"),
        (SHARED, 512, "step"),
        (SHARED, 513, "prompt"),
    ],
)
def test_larger_steps_are_stored_as_prompts_are(
    book: Codebook | None, tokens: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where it is faster, which with a shared codebook is further out."""
    called: list[str] = []

    def storing(name: str) -> Any:
        return lambda *given, **named: called.append(name) or torch.empty(0)

    monkeypatch.setattr(gpu.cuda_store, "store", storing("step"))
    made: Any = gpu.GpuKernels.__new__(gpu.GpuKernels)
    layer: Any = SimpleNamespace(cache=SimpleNamespace(k_codebook=book))
    made._prepared, made._arranged = {id(layer): None}, {id(layer): object()}
    made._prompts, made._page_size = storing("prompt"), 64
    call: Any = SimpleNamespace(q=torch.empty(tokens, 1, 1), k=None, v=None)
    made._store(layer, SimpleNamespace(slots=None), call)
    assert called == [kernel]


CPU = torch.device("cpu")
LARGE = Shape(head_dim=128, group=128, page_size=32)
SLOTS = StoreSlots(*[torch.zeros(0, dtype=torch.int64)] * 3)


@pytest.mark.parametrize(
    ("shape", "stride", "kernel"),
    [
        (LARGE, 256, "cuda"),
        (LARGE, 252, "triton"),
        (replace(LARGE, k_coding="symmetric"), 256, "triton"),
        (replace(LARGE, head_dim=64, group=64), 128, "triton"),
    ],
    ids=["", "unaligned", "other rows", "other heads"],
)
def test_chunks_are_cuda_s(shape: Shape, stride: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel can read vectors and write rows."""
    called: list[str] = []

    def storing(name: str) -> Any:
        return lambda *given, **named: called.append(name)

    monkeypatch.setattr(prompt_store, "store", storing("triton"))
    monkeypatch.setattr(prompt_store.prompt, "store", storing("cuda"))
    layer = CachedLayer(empty_cache(shape, 2, 2, CPU), shape.format())
    stored = PromptStore({id(layer): prepare(layer.format, shape.dtype)}, shape.page_size)
    kinds = stored.arrange([(layer, shape.q_heads)], shape.dtype)
    assert len(kinds) == (shape.head_dim == 128 and shape.k_coding == "affine")
    sizes, strides = (9, shape.kv_heads, shape.head_dim), (stride, shape.head_dim, 1)
    k = torch.empty(9 * 256, dtype=shape.dtype).as_strided(sizes, strides)
    stored(layer, SLOTS, k, k)
    assert called == [kernel]


def test_refits_replace_what_prompts_are_stored_by() -> None:
    """Every matrix that the kernel reads is another afterwards; its tensors stay where they are."""
    shape = LARGE
    first, second = (
        shape.format(
            SideTransform(random_rotation(128, seed, CPU), clip=0.96),
            SideTransform(random_rotation(128, seed + 1, CPU)),
        )
        for seed in (1, 3)
    )
    layer = CachedLayer(empty_cache(shape, 2, 2, CPU), first)
    stored = PromptStore({id(layer): prepare(first, shape.dtype)}, shape.page_size)
    stored.arrange([(layer, shape.q_heads)], shape.dtype)
    ((old, new),) = stored.made_of(layer, prepare(second, shape.dtype))
    put(list(pairs(old, new, "layer 0")), CPU)
    wanted = prompt.arrange(prepare(second, shape.dtype), shape.q_heads, shape.page_size)
    for name in ("key", "value", "reading"):
        assert torch.equal(getattr(old, name), getattr(wanted, name))
