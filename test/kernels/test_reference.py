"""The torch reference against brute force in float64, one token and one head at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import Shape, empty_cache, filled_batch, random_rotation, random_transform, random_vectors

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, Chunks, LayerCache, StoreSlots, Windows, split_positions
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.format import LayerFormat
from oscar_kernels.layout import CODEBOOK, SYMMETRIC
from oscar_kernels.sliding_window import attend
from oscar_kernels.transform import SideTransform

SHAPE = Shape(page_size=16, windows=Windows(sink=16, recent=24, ring=32))
CPU = torch.device("cpu")


def transform_of(name: str, shape: Shape) -> LayerFormat:
    """Formats that the reference is tried with: rotated keys, or everything there is, for each kv head apart."""
    if name == "shared":
        rotation = random_rotation(shape.head_dim, 1, CPU)
        return shape.format(SideTransform(rotation, clip=0.96), SideTransform(clip=0.96))
    center = torch.randn(shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(6))
    key = SideTransform(*random_transform(shape.head_dim, 4, shape.kv_heads), center, 0.96, 0.98)
    value = SideTransform(*random_transform(shape.head_dim, 5, shape.kv_heads), clip=0.92, gain=1.0)
    layer = shape.format(key, value)
    # Rows of values need not be like those of keys.
    return replace(layer, value=replace(layer.value, group_size=32, scale_dtype=torch.float32))


def transformed(x: torch.Tensor, transform: SideTransform) -> torch.Tensor:
    """float64 [tokens, kv_heads, head_dim], head by head."""
    y = x.double()
    if transform.matrix is not None:
        matrices = transform.matrix.double().expand(x.shape[1], -1, -1)
        y = torch.stack([y[:, head] @ matrices[head] for head in range(x.shape[1])], dim=1)
    return y if transform.center is None else y - transform.center.double()


def serve(lengths: list[int], layer: LayerFormat, shape: Shape = SHAPE) -> tuple[LayerCache, BatchTables, list[tuple]]:
    """Store requests token by token, as a server would, and keep the transformed vectors of every token."""
    counts = [-(-length // shape.page_size) for length in lengths]
    cache = empty_cache(shape, sum(counts) + 1, len(lengths), CPU, fill=float("nan"))
    v_rows = torch.zeros(len(cache.v_rows), layer.value_layout.row_bytes, dtype=torch.uint8)
    cache = replace(cache, k_layout=layer.key_layout, v_layout=layer.value_layout, v_rows=v_rows)
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
            reference.store(cache, slots, k[one], v[one], layer)
        kept.append((transformed(k, layer.key.transform), transformed(v, layer.value.transform)))
    lens = torch.tensor(lengths, dtype=torch.int32)
    return cache, BatchTables(shape.page_size, table, lens, owner, torch.zeros_like(owner), owner), kept


def cached_vectors(kept: tuple, length: int, layer: LayerFormat, shape: Shape) -> list[list[torch.Tensor]]:
    """What attention should read of ``length`` positions: keys and values, float64 [kv_heads, head_dim] each."""
    begin, end = split_positions(length, 0, shape.windows)
    out = []
    for y, side, layout in (
        (kept[0], layer.key, layer.key_layout),
        (kept[1], layer.value, layer.value_layout),
    ):
        rows = encode_rows(y[:length].float(), layout, side.transform.clip, side.transform.gain, side.codebook)
        read = torch.where(
            ((torch.arange(length) >= begin) & (torch.arange(length) < end))[:, None, None],
            decode_rows(rows, layout, side.codebook).double(),
            y[:length].to(shape.dtype).double(),
        )
        out.append(list(read))
    return out


def of_head(matrix: torch.Tensor | None, head: int) -> torch.Tensor:
    """A head's matrix in float64."""
    if matrix is None:
        return torch.eye(SHAPE.head_dim, dtype=torch.float64)
    return (matrix if matrix.dim() == 2 else matrix[head]).double()


def brute_force(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float
) -> torch.Tensor:
    """One query head [d] over lists of keys and values [d]."""
    weight = torch.stack([scale * (query * key).sum() for key in keys]).softmax(0)
    return sum(w * value for w, value in zip(weight, values, strict=True))


@pytest.mark.parametrize("name", ["shared", "per head"])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, windows=Windows(0, 0, 0)),
        replace(SHAPE, gqa=1, group=32),
        replace(SHAPE, k_coding=CODEBOOK, v_coding=SYMMETRIC),
    ],
    ids=str,
)
def test_decode_is_softmax_over_what_was_stored(shape: Shape, name: str) -> None:
    lengths = [1, 17, 70]
    layer = transform_of(name, shape)
    reading, back = layer.key.transform.reading, layer.value.transform.back
    cache, tables, kept = serve(lengths, layer, shape)
    q = random_vectors((3, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    out = reference.rotate(reference.decode(cache, tables, q, reading, 0.1), back)
    for request, length in enumerate(lengths):
        keys, values = cached_vectors(kept[request], length, layer, shape)
        for head in range(shape.q_heads):
            kv = head // shape.gqa
            query = q[request, head].double() @ of_head(reading, kv)
            want = brute_force(query, [key[kv] for key in keys], [value[kv] for value in values], 0.1)
            want = want @ of_head(back, kv)
            torch.testing.assert_close(out[request, head].double(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["shared", "per head"])
def test_extend_is_causal_and_exact_within_the_chunk(name: str) -> None:
    shape, prefixes, lengths = SHAPE, [0, 60], [5, 4]
    layer = transform_of(name, shape)
    key, value = layer.key.transform, layer.value.transform
    cache, tables, kept = serve([1, 60], layer)
    tables = replace(tables, kv_lens=torch.tensor(prefixes, dtype=torch.int32))
    q = random_vectors((9, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    k, v = (random_vectors((9, shape.kv_heads, shape.head_dim), shape.dtype, seed, CPU) for seed in (7, 8))
    chunk = k if key.plain_center is None else k.float() - key.plain_center
    carried = reference.rotate(v, value.matrix)
    out = reference.extend(cache, tables, Chunks.of(q, chunk, carried, lengths), key.reading, 0.1)
    out = reference.rotate(out, value.back)
    begin = 0
    for request, length in enumerate(lengths):
        keys, values = cached_vectors(kept[request], prefixes[request], layer, shape)
        for step in range(length):
            for head in range(shape.q_heads):
                kv = head // shape.gqa
                query, own = q[begin + step, head].double(), slice(begin, begin + step + 1)
                # A query times a matrix scores like a plain one on keys times its transpose; a center shifts all alike.
                center = 0 if key.plain_center is None else key.plain_center[kv].double()
                seen = [of_head(key.reading, kv) @ cached[kv] for cached in keys]
                seen += [one[kv].double() - center for one in k[own]]
                read = [cached[kv] @ of_head(value.back, kv) for cached in values]
                read += [one[kv].double() for one in v[own]]
                want = brute_force(query, seen, read, 0.1)
                torch.testing.assert_close(out[begin + step, head].double(), want, rtol=2e-3, atol=2e-3)
        begin += length


def test_blocks_of_queries_do_not_change_extend(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE
    layer = transform_of("shared", shape)
    cache, tables, _ = serve([50], layer)
    reading = layer.key.transform.reading
    q = random_vectors((30, shape.q_heads, shape.head_dim), shape.dtype, 9, CPU)
    k = random_vectors((30, shape.kv_heads, shape.head_dim), shape.dtype, 7, CPU)
    chunks = Chunks.of(q, k, k, [30])
    whole = reference.extend(cache, tables, chunks, reading, 0.1)
    monkeypatch.setattr(reference, "QUERY_BLOCK", 7)
    torch.testing.assert_close(reference.extend(cache, tables, chunks, reading, 0.1), whole)


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


def test_a_value_that_is_no_number_is_told_to_those_that_see_it() -> None:
    """In a chunk, and in a layer with a window: not to tokens before it, nor to those that are too far on."""
    shape, tokens = SHAPE, 9
    batch = filled_batch(shape, [20], CPU)
    counts = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (random_vectors((tokens, heads, shape.head_dim), torch.float32, 7, CPU) for heads in counts)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        chunks = Chunks.of(q, k, v, [tokens])
        return reference.extend(batch.cache, batch.tables, chunks, None, 0.1), attend(q, k, v, 0.1, window=2)

    clean = both()
    v[4, -1, 3] = float("nan")
    for out, want, seen in zip(both(), clean, (slice(4, 9), slice(4, 7)), strict=True):
        broken = torch.zeros_like(out, dtype=torch.bool)
        broken[seen, -shape.gqa :, 3] = True
        assert torch.equal(out.isnan(), broken)
        torch.testing.assert_close(out[~broken], want[~broken])
