"""Copies that the store leaves of keys and values beside the cache."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Shape, empty_cache, random_rotation, random_vectors

from oscar_kernels.cache import Copies, StoreSlots, Windows
from oscar_kernels.prepared import prepare
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.store import store


@pytest.mark.parametrize("rotated", [False, True])
def test_copies_are_what_windows_hold(rotated: bool, device: torch.device) -> None:
    """Keys and values of all tokens but one, each in a row of its own; other rows stay as they were."""
    shape, tokens = Shape(windows=Windows(16, 24, 64)), 40
    cache = empty_cache(shape, 8, 2, device)
    center = random_vectors((shape.kv_heads, shape.head_dim), torch.float32, 3, device)
    turn = random_rotation(shape.head_dim, 1, device) if rotated else None
    layer = prepare(shape.format(SideTransform(turn, center=center), SideTransform(turn)), shape.dtype)
    k, v = (random_vectors((tokens, shape.kv_heads, shape.head_dim), shape.dtype, seed, device) for seed in (1, 2))
    number = torch.arange(tokens, device=device)
    rows = torch.where(number == 7, -1, 3 * number)
    space = torch.full((2, 3 * tokens, shape.kv_heads, shape.head_dim), 7.0, dtype=shape.dtype, device=device)
    store(cache, StoreSlots(number, number, number.clamp(max=-1)), k, v, layer, copies=Copies(*space, rows))
    kept = number[number != 7]
    for copy, ring in zip(space, (cache.k_ring, cache.v_ring), strict=True):
        assert torch.equal(copy[3 * kept], ring.flatten(0, 1)[kept])
        others = torch.ones(len(copy), dtype=torch.bool, device=device)
        others[3 * kept] = False
        assert (copy[others] == 7).all()


def test_copies_that_do_not_fit(device: torch.device) -> None:
    shape = Shape()
    cache, nowhere = empty_cache(shape, 4, 2, device), torch.full((3,), -1, dtype=torch.int64, device=device)
    k = random_vectors((3, shape.kv_heads, shape.head_dim), shape.dtype, 1, device)
    layer = prepare(shape.format(SideTransform(), SideTransform()), shape.dtype)
    slots = StoreSlots(nowhere.clamp(min=0), nowhere, nowhere)
    for copies, message in (
        (Copies(k[:, :1], k, nowhere), "rows of k"),
        (Copies(k, k.transpose(0, 1), nowhere), "rows of v"),
        (Copies(k, k, nowhere[:2]), "rows of copies"),
        (Copies(k, k, nowhere.int()), "rows of copies"),
    ):
        with pytest.raises(ValueError, match=message):
            store(cache, slots, k, k, layer, copies=copies)
