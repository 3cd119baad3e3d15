"""Random caches and batches for the kernel tests, and the float64 attention that they are judged by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from oscar_kernels import reference
from oscar_kernels.cache import BatchTables, LayerCache, StoreSlots, Windows, split_positions
from oscar_kernels.codebook import Codebook
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC, RowLayout
from oscar_kernels.spans import Spans
from oscar_kernels.transform import SideTransform


def random_rotation(head_dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """float32 orthogonal [head_dim, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator).double())[0].float().to(device)


def random_transform(head_dim: int, seed: int, heads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix that is not orthogonal and its dual, float32 on the CPU: shared, or one per kv head."""
    sets = range(1 if heads is None else heads)
    scale = torch.linspace(0.5, 2.0, head_dim)
    bases = torch.stack([random_rotation(head_dim, 100 * seed + head, torch.device("cpu")) for head in sets])
    matrix, dual = bases * scale, bases / scale
    return (matrix[0], dual[0]) if heads is None else (matrix, dual)


def multiplied(out: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[tokens, q_heads, head_dim] times the matrix of their kv head, rounded to their dtype once."""
    heads = out.double().unflatten(1, (1 if matrix.dim() == 2 else len(matrix), -1))
    return (heads @ matrix.double()).flatten(1, 2).to(out.dtype)


def random_vectors(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Normal vectors with two outlier channels, as keys have them."""
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    x[..., 3] += 4.0
    x[..., shape[-1] // 2 + 1] *= 5.0
    return x.to(dtype)


@dataclass(frozen=True)
class Shape:
    """What a test varies: geometry of heads, of rows, of windows and of pages."""

    kv_heads: int = 2
    gqa: int = 4
    head_dim: int = 64
    group: int = 64
    scale_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    windows: Windows = Windows(sink=16, recent=24, ring=32)
    page_size: int = 16
    k_bits: int = 2
    v_bits: int = 2
    v_group: int | None = None
    k_coding: str = AFFINE
    v_coding: str = AFFINE
    shared_book: bool = False
    v_head_dim: int = 0

    @property
    def value_dim(self) -> int:
        """Channels of a head of the values."""
        return self.v_head_dim or self.head_dim

    @property
    def key_layout(self) -> RowLayout:
        return RowLayout(
            self.kv_heads, self.head_dim, self.group, self.scale_dtype, self.k_bits, self.exact_dtype, self.k_coding
        )

    @property
    def value_layout(self) -> RowLayout:
        group = self.v_group or self.group
        return RowLayout(
            self.kv_heads, self.value_dim, group, self.scale_dtype, self.v_bits, self.exact_dtype, self.v_coding
        )

    @property
    def codebook(self) -> Codebook | None:
        """Random points, the same for every cache of these heads, on the CPU."""
        if self.k_coding != CODEBOOK:
            return None
        size, drawn = (self.kv_heads, self.head_dim // 4), torch.Generator().manual_seed(5)
        if not self.shared_book:
            return Codebook.from_points(torch.randn((*size, 256, 4), generator=drawn))
        points = torch.randn((256, 4), generator=drawn)
        return Codebook.from_shared(points, 0.5 + torch.rand(size, generator=drawn))

    @property
    def exact_dtype(self) -> torch.dtype:
        """Of a side of 16 bits: the model's."""
        return self.dtype

    def layout_of(self, name: str) -> RowLayout:
        """Of keys or values, by a name that begins with k or v."""
        return self.key_layout if name.startswith("k") else self.value_layout

    def format(self, key: SideTransform | None = None, value: SideTransform | None = None) -> LayerFormat:
        """Both sides in these rows; no transform where none is given."""
        sides = (
            SideFormat(
                layout.group_size, layout.scale_dtype, layout.bits, transform or SideTransform(), layout.exact_dtype,
                layout.coding, codebook,
            )
            for layout, transform, codebook in (
                (self.key_layout, key, self.codebook), (self.value_layout, value, None)
            )
        )  # fmt: skip
        return LayerFormat(self.kv_heads, self.head_dim, *sides, self.value_dim)

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.gqa


CPU = torch.device("cpu")

OF_EVERY_WIDTH = [
    Shape(k_bits=3),
    Shape(gqa=2, kv_heads=1, head_dim=128, group=128, v_group=32, k_bits=4, page_size=64),
    Shape(
        gqa=5, kv_heads=3, head_dim=128, group=64, k_bits=3, v_bits=4, dtype=torch.float16, scale_dtype=torch.float16
    ),
    Shape(gqa=1, kv_heads=1, head_dim=256, group=32, v_group=256, k_bits=3, v_bits=3, scale_dtype=torch.float32),
    Shape(gqa=8, kv_heads=1, head_dim=64, group=32, k_bits=4, v_bits=4),
]
"""Codes of 2, 3 and 4 bits on either side, groups of its own for each, every head_dim."""


OF_16_BITS = [
    Shape(k_bits=16),
    Shape(gqa=2, kv_heads=3, head_dim=128, group=128, v_bits=16, page_size=64),
    Shape(gqa=5, group=32, k_bits=16, v_bits=4, dtype=torch.float16, page_size=8),
    Shape(gqa=1, kv_heads=1, head_dim=256, k_bits=3, v_bits=16, scale_dtype=torch.float32),
    Shape(gqa=2, k_bits=16, v_bits=16, windows=Windows(0, 0, 0)),
]
"""Keys, values or both left exact, beside codes of every width, every head_dim, pages smaller than a tile."""


OF_OTHER_CODINGS = [
    Shape(k_coding=CODEBOOK, v_coding=SYMMETRIC),
    Shape(gqa=2, kv_heads=3, head_dim=128, group=128, v_group=64, k_bits=3, v_bits=4, k_coding=SYMMETRIC, page_size=64),
    Shape(
        gqa=5, kv_heads=1, head_dim=128, v_group=32, v_bits=3, k_coding=CODEBOOK, v_coding=SYMMETRIC,
        dtype=torch.float16, scale_dtype=torch.float16,
    ),
    Shape(gqa=1, kv_heads=1, head_dim=256, group=32, k_coding=CODEBOOK, v_bits=4, scale_dtype=torch.float32),
    Shape(gqa=2, k_bits=4, k_coding=SYMMETRIC, v_bits=16, page_size=8),
]  # fmt: skip
"""Symmetric codes of every width on either side, codebooks of keys beside every coding, every head_dim."""

OF_UNEQUAL_HEADS = [
    Shape(gqa=4, head_dim=192, v_head_dim=128, v_group=128),
    Shape(gqa=16, kv_heads=1, head_dim=192, v_head_dim=128, k_coding=CODEBOOK, v_coding=SYMMETRIC, page_size=64),
    Shape(gqa=2, kv_heads=3, head_dim=192, v_head_dim=128, group=32, v_group=64, k_bits=3, v_bits=4,
          dtype=torch.float16, scale_dtype=torch.float16),
    Shape(gqa=2, head_dim=192, v_head_dim=128, k_bits=16, v_bits=3, page_size=8),
    Shape(gqa=8, kv_heads=1, head_dim=192, v_head_dim=128, k_bits=4, v_bits=16, k_coding=SYMMETRIC),
    Shape(gqa=3, head_dim=64, v_head_dim=128),
]  # fmt: skip
"""Keys whose heads have more channels than those of values, or fewer; 192 are no power of two, with every coding."""


def sampled(shapes: list[Shape], first: int = 0) -> list[Shape]:
    """All of them on a GPU; in Triton's interpreter, which takes seconds for each, every second one from ``first``."""
    return shapes if torch.cuda.is_available() else shapes[first::2]


def empty_cache(shape: Shape, pages: int, requests: int, device: torch.device, fill: float = 0.0) -> LayerCache:
    """A cache with room for so many pages and requests (+1 each for the dummies)."""
    windows = shape.windows

    def buffer(head_dim: int, *size: int) -> torch.Tensor:
        return torch.full((*size, shape.kv_heads, head_dim), fill, dtype=shape.dtype, device=device)

    def rows(layout: RowLayout) -> torch.Tensor:
        return torch.zeros(pages * shape.page_size, layout.row_bytes, dtype=torch.uint8, device=device)

    return LayerCache(
        shape.key_layout,
        shape.value_layout,
        windows,
        rows(shape.key_layout),
        rows(shape.value_layout),
        *(buffer(of, requests + 1, windows.sink) for of in (shape.head_dim, shape.value_dim)),
        *(buffer(of, requests + 1, windows.ring) for of in (shape.head_dim, shape.value_dim)),
        None if shape.codebook is None else shape.codebook.to(device),
    )


@dataclass(frozen=True)
class Batch:
    """A filled cache, its tables and the rotated keys and values before quantization."""

    shape: Shape
    cache: LayerCache
    tables: BatchTables


def filled_batch(
    shape: Shape, kv_lens: list[int], device: torch.device, ring_starts: list[int] | None = None, seed: int = 0
) -> Batch:
    """Requests of the given lengths on shuffled pages, rows, blocks; whatever must not be read is NaN.

    Page 0, sink block 0 and ring row 0 are dummies. Window rows that no position owns and the scales of history
    rows that a window covers are NaN too, so a kernel that reads a row too many cannot pass.
    """
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-length // shape.page_size) for length in kv_lens]
    total, batch = 1 + sum(pages_of), len(kv_lens)
    cache = empty_cache(shape, total, batch, device, fill=float("nan"))
    for rows in (cache.k_rows, cache.v_rows):
        rows.fill_(0xFF)  # NaN in every scale dtype
    order = 1 + torch.randperm(total - 1, generator=generator)
    page_table = torch.zeros(batch, max(pages_of, default=1) or 1, dtype=torch.int32)
    ring_row = (1 + torch.randperm(batch, generator=generator)).int()
    sink_block = (1 + torch.randperm(batch, generator=generator)).int()
    ring_start = torch.tensor(ring_starts or [0] * batch, dtype=torch.int32)
    used = 0
    for request, length in enumerate(kv_lens):
        own = order[used : used + pages_of[request]]
        used += pages_of[request]
        page_table[request, : len(own)] = own.int()
        begin, end = split_positions(length, int(ring_start[request]), shape.windows)
        position = torch.arange(length, device=device)
        own = own.to(device)
        slot = own[position // shape.page_size] * shape.page_size + position % shape.page_size
        for offset, layout, rows, sink, ring, codebook in (
            (1, cache.k_layout, cache.k_rows, cache.k_sink, cache.k_ring, cache.k_codebook),
            (2, cache.v_layout, cache.v_rows, cache.v_sink, cache.v_ring, None),
        ):
            size = (length, shape.kv_heads, layout.head_dim)
            y = random_vectors(size, torch.float32, seed + 10 * request + offset, device)
            rows[slot[begin:end]] = encode_rows(y[begin:end], layout, 0.96, 0.0, codebook)
            sink[sink_block[request], :begin] = y[:begin].to(shape.dtype)
            if end < length:
                ring[ring_row[request], position[end:] % shape.windows.ring] = y[end:].to(shape.dtype)
    tables = BatchTables(
        shape.page_size, page_table, torch.tensor(kv_lens, dtype=torch.int32), ring_row, ring_start, sink_block
    )
    moved = {name: value.to(device) for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
    return Batch(shape, cache, replace(tables, **moved))


def with_new_tokens(batch: Batch, tokens: int, seed: int = 7) -> Batch:
    """The batch with new tokens of every request in its ring, behind those that its length counts."""
    shape, ring = batch.shape, batch.shape.windows.ring
    for request, kv_len in enumerate(batch.tables.kv_lens.tolist()):
        place = torch.arange(kv_len, kv_len + tokens, device=batch.cache.k_ring.device) % ring
        for offset, store in enumerate((batch.cache.k_ring, batch.cache.v_ring)):
            size = (tokens, shape.kv_heads, store.shape[-1])
            y = random_vectors(size, shape.dtype, seed + 10 * request + offset, CPU)
            store[batch.tables.ring_row[request].long(), place] = y.to(store.device)
    return batch


def random_trees(batch: int, tokens: int, seed: int = 3) -> torch.Tensor:
    """Masks of random trees, the first a chain: bool [batch, tokens, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    for request in range(batch):
        for token in range(tokens):
            if token:
                parent = token - 1 if request == 0 else int(torch.randint(0, token, (), generator=generator))
                seen[request, token] = seen[request, parent]
            seen[request, token, token] = True
    return seen


def verify_exact(
    batch: Batch, seen: torch.Tensor, q_rot: torch.Tensor, sm_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Verification of every request from the codes as stored, in ``dtype``: [batch * tokens, q_heads, head_dim]."""
    tokens, ring = seen.shape[1], batch.shape.windows.ring
    out = torch.zeros(*q_rot.shape[:2], batch.shape.value_dim, dtype=dtype, device=q_rot.device)
    for request, kv_len in enumerate(batch.tables.kv_lens.tolist()):
        k, v = reference.gather(batch.cache, batch.tables, request, kv_len)
        row = int(batch.tables.ring_row[request])
        place = torch.arange(kv_len, kv_len + tokens, device=q_rot.device) % ring
        k = torch.cat([k, batch.cache.k_ring[row, place].float()])
        v = torch.cat([v, batch.cache.v_ring[row, place].float()])
        hidden = torch.zeros(tokens, len(k), dtype=torch.bool, device=q_rot.device)
        hidden[:, kv_len:] = ~seen[request].to(q_rot.device)
        own = slice(request * tokens, (request + 1) * tokens)
        out[own] = attend(q_rot[own], k, v, sm_scale, dtype, hidden)
    return out


def poison(batch: Batch, side: str, request: int, position: int) -> None:
    """A history row of a request becomes what the codec makes of a NaN in its last head; ``side``: k_rows or v_rows."""
    shape, rows = batch.shape, getattr(batch.cache, side)
    page = int(batch.tables.page_table[request, position // shape.page_size])
    slot = page * shape.page_size + position % shape.page_size
    layout = shape.layout_of(side)
    book = shape.codebook if side.startswith("k") else None
    y = decode_rows(rows[slot : slot + 1].cpu(), layout, book)
    y[0, -1, 3] = float("nan")
    head = encode_rows(y, layout, 1.0, 0.0, book)[0].to(rows.device)
    codes = slice((shape.kv_heads - 1) * layout.code_bytes, layout.params_offset)
    params = slice(layout.row_bytes - layout.param_bytes, layout.row_bytes)
    for part in (codes, params):
        rows[slot, part] = head[part]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, dtype: torch.dtype, mask: torch.Tensor | None
) -> torch.Tensor:
    """Plain attention of one request with every tensor and every intermediate in ``dtype``.

    q [queries, q_heads, d], k and v [keys, kv_heads, d], mask [queries, keys] true where hidden.
    """
    kv_heads, head_dim = k.shape[1:]
    q = q.to(dtype).view(q.shape[0], kv_heads, q.shape[1] // kv_heads, head_dim)
    k, v = k.to(dtype), v.to(dtype)
    scores = torch.einsum("qhgd,thd->hgqt", q, k) * sm_scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.einsum("hgqt,thd->qhgd", scores.softmax(-1).to(dtype), v).flatten(1, 2)


def decode_exact(batch: Batch, q_rot: torch.Tensor, sm_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Decode of every request from the codes as stored, in ``dtype``; zeros for an empty request."""
    out = torch.zeros(*q_rot.shape[:2], batch.shape.value_dim, dtype=dtype, device=q_rot.device)
    for request, kv_len in enumerate(batch.tables.kv_lens.tolist()):
        if kv_len:
            k, v = reference.gather(batch.cache, batch.tables, request, kv_len)
            out[request] = attend(q_rot[request : request + 1], k, v, sm_scale, dtype, None)[0]
    return out


def lse_exact(batch: Batch, q_rot: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """float64 [batch, q_heads]: log2 of the sum of exp(logits); -inf for an empty request."""
    out = torch.full(q_rot.shape[:2], float("-inf"), dtype=torch.float64, device=q_rot.device)
    for request, kv_len in enumerate(batch.tables.kv_lens.tolist()):
        k, _ = reference.gather(batch.cache, batch.tables, request, kv_len)
        heads = q_rot[request].double().unflatten(0, (k.shape[1], -1))
        logits = torch.einsum("hgd,thd->hgt", heads, k.double()) * sm_scale
        out[request] = logits.logsumexp(-1).flatten() / math.log(2)
    return out


def assert_lse(lse: torch.Tensor, batch: Batch, q_rot: torch.Tensor, sm_scale: float) -> None:
    """Within what two results may be weighted wrongly without harm: .01 in log2; -inf exactly where it belongs."""
    exact = lse_exact(batch, q_rot, sm_scale)
    assert torch.equal(lse == float("-inf"), exact == float("-inf"))
    some = exact > float("-inf")
    assert ((lse.double() - exact)[some].abs() < 0.01).all(), (lse.double() - exact)[some].abs().max()


def with_padding(tables: BatchTables, rows: int) -> BatchTables:
    """Tables with ``rows`` more requests as a CUDA graph pads them: one token, in the dummy page, row and block."""

    def pad(name: str, value: int) -> torch.Tensor:
        x = getattr(tables, name)
        return torch.cat([x, torch.full((rows, *x.shape[1:]), value, dtype=x.dtype, device=x.device)])

    names = ("page_table", "ring_row", "ring_start", "sink_block")
    return replace(tables, kv_lens=pad("kv_lens", 1), **{name: pad(name, 0) for name in names})


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def assert_as_good_as(out: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Error of a kernel at most twice that of the model's 16-bit arithmetic in plain torch, in rms and at worst."""
    assert torch.isfinite(out).all()
    error, bound = out.double() - exact.double(), plain.double() - exact.double()
    floor = 1e-3 * rms(exact) + 1e-30
    assert rms(error) <= 2 * rms(bound) + floor, (rms(error), rms(bound), rms(exact))
    worst = float(error.abs().max()) if error.numel() else 0.0
    plain_worst = float(bound.abs().max()) if bound.numel() else 0.0
    assert worst <= 2 * plain_worst + 4 * floor, (worst, plain_worst)


def random_slots(
    tokens: int, windows: Windows, slots: int, requests: int, device: torch.device, seed: int = 0
) -> StoreSlots:
    """Unique slots in random order; about every third token has no place in the ring, or in the sink store."""
    generator = torch.Generator().manual_seed(seed)

    def places(size: int) -> torch.Tensor:
        index = torch.randperm(max(size, tokens), generator=generator)[:tokens]
        index[torch.rand(tokens, generator=generator) < 0.3] = -1
        return torch.where(index < size, index, -1).to(device)

    row = torch.randperm(slots, generator=generator)[:tokens].to(device)
    return StoreSlots(row, places((requests + 1) * windows.ring), places((requests + 1) * windows.sink))


def break_new_token(batch: Batch, request: int, token: int, side: str, number: float) -> None:
    """One channel of the last head of a new token's keys or values (``side``: k_ring or v_ring) is ``number``."""
    ring = getattr(batch.cache, side)
    place = (int(batch.tables.kv_lens[request]) + token) % batch.shape.windows.ring
    ring[batch.tables.ring_row[request].long(), place, -1, 3] = number


def assert_copies_equal_the_cache(
    batch: Batch, spans: list[tuple[int, int, int]], copy: Callable[..., None], further_heads: int = 0
) -> None:
    """Prefixes in 16 bits are what the reference reads, bit for bit; rows and heads around them stay as they were.

    Args:
        batch: whose cache is copied.
        spans: request, first position and end of each.
        copy: as :func:`oscar_kernels.triton.prefix.copy_prefixes`.
        further_heads: of other parts, behind this cache's in every row.
    """
    shape, device = batch.shape, batch.tables.kv_lens.device
    indptr = torch.tensor([0, *(end - begin for _, begin, end in spans)]).cumsum(0).int()
    requests, begins = (torch.tensor([span[i] for span in spans], dtype=torch.int32, device=device) for i in (0, 1))
    rows, heads = int(indptr[-1]), shape.kv_heads
    space = torch.full((2, rows + 1, heads + further_heads, shape.head_dim), 7.0, dtype=shape.dtype, device=device)
    copy(batch.cache, batch.tables, Spans(requests, begins, indptr.to(device)), *space[:, :rows, :heads])
    assert (space[:, rows] == 7).all()
    assert (space[:, :, heads:] == 7).all()
    for (request, begin, end), first in zip(spans, indptr.tolist(), strict=False):
        wanted = reference.gather(batch.cache, batch.tables, request, int(batch.tables.kv_lens[request]))
        for got, want in zip(space, wanted, strict=True):
            copied = got[first : first + end - begin, :heads]
            torch.testing.assert_close(copied, want[begin:end].to(shape.dtype), rtol=0, atol=0)
