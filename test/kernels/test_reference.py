"""The torch reference against brute force in float64, one token and one head at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Shape, empty_cache, random_rotation, random_vectors

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, LayerCache, StoreSlots, Windows, split_positions
from oscar_kernels.codec import decode_rows, encode_rows

SHAPE = Shape(page_size=16, windows=Windows(sink=16, recent=24, ring=32))
CPU = torch.device("cpu")
CLIP = 0.96


def serve(lengths: list[int], shape: Shape = SHAPE) -> tuple[LayerCache, BatchTables, list[tuple], torch.Tensor]:
    """Store requests token by token, as a server would, and keep the rotated vectors of every token."""
    rotation = random_rotation(shape.head_dim, 1, CPU)
    counts = [-(-length // shape.page_size) for length in lengths]
    cache = empty_cache(shape, sum(counts) + 1, len(lengths), CPU, fill=float("nan"))
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    owner = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    windows, used, kept = shape.windows, 0, []
    for request, length in enumerate(lengths):
        table[request, : counts[request]] = order[used : used + counts[request]].int()
        used += counts[request]
        k, v = (random_vectors((length, shape.kv_heads, shape.head_dim), shape.dtype, seed, CPU) for seed in (2, 3))
        for position in range(length):
            row = table[request, position // shape.page_size] * shape.page_size + position % shape.page_size
            slot = int(owner[request])
            ring = slot * windows.ring + position % windows.ring if windows.ring else -1
            sink = slot * windows.sink + position if position < windows.sink else -1
            slots = StoreSlots(*(torch.tensor([int(index)]) for index in (row, ring, sink)))
            one = slice(position, position + 1)
            reference.store(cache, slots, k[one], v[one], rotation, None, CLIP, CLIP)
        kept.append((k.double() @ rotation.double(), v.double()))
    lens = torch.tensor(lengths, dtype=torch.int32)
    return cache, BatchTables(shape.page_size, table, lens, owner, torch.zeros_like(owner), owner), kept, rotation


def cached_vector(y: torch.Tensor, position: int, length: int, shape: Shape) -> torch.Tensor:
    """What attention should read for a position: [kv_heads, head_dim] float64."""
    begin, end = split_positions(length, 0, shape.windows)
    if begin <= position < end:
        row = encode_rows(y[position : position + 1].float(), shape.layout, CLIP)
        return decode_rows(row, shape.layout)[0].double()
    return y[position].to(shape.dtype).double()


def brute_force(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """One query head [d] over lists of keys and values [d]."""
    weight = torch.stack([scale * (query * key).sum() for key in keys]).softmax(0)
    return sum(w * value for w, value in zip(weight, values, strict=True))


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, windows=Windows(0, 0, 0)), replace(SHAPE, gqa=1, group=32)], ids=str
)
def test_decode_is_softmax_over_what_was_stored(shape: Shape) -> None:
    lengths = [1, 17, 70]
    cache, tables, kept, rotation = serve(lengths, shape)
    q = random_vectors((3, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    out = reference.decode(cache, tables, q, rotation, 0.1)
    for request, length in enumerate(lengths):
        keys, values = (
            [cached_vector(side, position, length, shape) for position in range(length)] for side in kept[request]
        )
        for head in range(shape.q_heads):
            kv = head // shape.gqa
            query = q[request, head].double() @ rotation.double()
            want = brute_force(query, [key[kv] for key in keys], [value[kv] for value in values], 0.1)
            torch.testing.assert_close(out[request, head].double(), want, rtol=2e-3, atol=2e-3)


def test_extend_is_causal_and_exact_within_the_chunk() -> None:
    shape, prefixes, lengths = SHAPE, [0, 60], [5, 4]
    cache, tables, kept, rotation = serve([1, 60])
    tables = replace(tables, kv_lens=torch.tensor(prefixes, dtype=torch.int32))
    q = random_vectors((9, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    k, v = (random_vectors((9, shape.kv_heads, shape.head_dim), shape.dtype, seed, CPU) for seed in (7, 8))
    out = reference.extend(cache, tables, q, k, v, lengths, rotation, 0.1)
    begin = 0
    for request, length in enumerate(lengths):
        prefix = prefixes[request]
        keys, values = (
            [cached_vector(side, position, prefix, shape) for position in range(prefix)] for side in kept[request]
        )
        for step in range(length):
            for head in range(shape.q_heads):
                kv = head // shape.gqa
                query, own = q[begin + step, head].double(), slice(begin, begin + step + 1)
                # A rotated query on rotated keys scores like a plain one on keys rotated back.
                seen = [rotation.double() @ key[kv] for key in keys] + [key[kv].double() for key in k[own]]
                carried = [value[kv] for value in values] + [value[kv].double() for value in v[own]]
                want = brute_force(query, seen, carried, 0.1)
                torch.testing.assert_close(out[begin + step, head].double(), want, rtol=2e-3, atol=2e-3)
        begin += length


def test_blocks_of_queries_do_not_change_extend(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE
    cache, tables, _, rotation = serve([50])
    q = random_vectors((30, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    k = random_vectors((30, shape.kv_heads, shape.head_dim), shape.dtype, 7, CPU)
    whole = reference.extend(cache, tables, q, k, k, [30], rotation, 0.1)
    monkeypatch.setattr(reference, "QUERY_BLOCK", 7)
    torch.testing.assert_close(reference.extend(cache, tables, q, k, k, [30], rotation, 0.1), whole)


@pytest.mark.parametrize(
    ("kv_len", "ring_start", "windows", "borders"),
    [
        (1000, 0, Windows(64, 256, 256), (64, 744)),
        (1000, 900, Windows(64, 256, 256), (64, 900)),
        (40, 0, Windows(64, 256, 256), (40, 40)),
        (100, 0, Windows(64, 256, 256), (64, 64)),
        (100, 200, Windows(64, 256, 256), (64, 100)),
        (100, 0, Windows(0, 0, 0), (0, 100)),
        (100, 0, Windows(64, 0, 0), (64, 100)),
        (0, 0, Windows(64, 256, 256), (0, 0)),
    ],
)
def test_borders(kv_len: int, ring_start: int, windows: Windows, borders: tuple[int, int]) -> None:
    assert split_positions(kv_len, ring_start, windows) == borders


@pytest.mark.parametrize("sizes", [(-1, 0, 0), (0, -1, 0), (0, 8, 7)])
def test_windows_reject(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="sink"):
        Windows(*sizes)
