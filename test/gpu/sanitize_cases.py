"""Small launches for compute-sanitizer: of our Triton kernels, or with ``cuda`` of the CUDA kernels."""

from __future__ import annotations

import sys

import torch
from kernel_cases import Batch, Shape, empty_cache, filled_batch, random_rotation, random_slots, random_vectors

from oscar_kernels.cache import Chunks, Copies, Windows
from oscar_kernels.prepared import prepare
from oscar_kernels.ragged_extend import CopyPrefixes
from oscar_kernels.spans import Spans
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.decode import decode
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.merge_states import merge_states_
from oscar_kernels.triton.prefix import copy_prefixes
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.store import store

SHAPES = [
    Shape(kv_heads=2, gqa=4, head_dim=128, group=64, page_size=64, windows=Windows(16, 24, 32)),
    Shape(kv_heads=1, gqa=2, head_dim=64, group=32, page_size=16, windows=Windows(16, 24, 24)),
    Shape(kv_heads=2, gqa=4, head_dim=64, group=64, k_bits=3),
    Shape(kv_heads=1, gqa=2, head_dim=128, group=128, v_group=32, k_bits=4, page_size=64),
    Shape(kv_heads=2, gqa=2, head_dim=128, group=128, k_bits=16, page_size=64),
    Shape(kv_heads=2, gqa=4, head_dim=64, k_bits=2, v_bits=16),
]
LENGTHS = [1, 30, 150, 300]


def run(shape: Shape, device: torch.device) -> None:
    """Every kernel once, but that of the tables, which has a test of its own."""
    tokens = 37
    rotation = random_rotation(shape.head_dim, 1, device)
    # A matrix per kv head, of keys: both ways through the kernel.
    matrices = rotation.repeat(shape.kv_heads, 1, 1)
    layer = prepare(shape.format(SideTransform(matrices, clip=0.96), SideTransform(rotation, clip=0.92)), shape.dtype)
    q, k, v = (
        random_vectors((tokens, heads, shape.head_dim), shape.dtype, seed, device)
        for seed, heads in enumerate((shape.q_heads, shape.kv_heads, shape.kv_heads))
    )
    cache = empty_cache(shape, 8, 4, device)
    slots = random_slots(tokens, shape.windows, 8 * shape.page_size, 4, device)
    store(cache, slots, k, v, layer, q=q)
    batch = filled_batch(shape, LENGTHS, device)
    q_rot = rotate(q, layer.key.reading)
    few = q_rot[: len(LENGTHS)].contiguous()
    decode(batch.cache, batch.tables, few, 0.1, lse=torch.empty(few.shape[:2], device=device))
    starts = torch.tensor([0, 1, 10, 30, tokens], dtype=torch.int32, device=device)
    lse = torch.empty(tokens, shape.q_heads, device=device)
    out = extend(batch.cache, batch.tables, Chunks(q, k, v, starts), q_rot, 0.1, lse=lse)
    copies = Copies(torch.zeros_like(k), torch.zeros_like(v), torch.arange(tokens, device=device))
    store(cache, slots, k, v, layer, q=q, copies=copies)
    prefixes = copied(batch, copy_prefixes)
    merge_states_(out, lse, out.clone(), lse.clone())
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()
    assert torch.isfinite(prefixes).all()
    assert torch.isfinite(copies.k).all()


def copied(batch: Batch, copy: CopyPrefixes) -> torch.Tensor:
    """All that is cached, [keys and values, rows, kv_heads, head_dim]."""
    shape, lengths = batch.shape, batch.tables.kv_lens
    requests = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    rows = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    space = torch.empty(2, int(rows[-1]), shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=lengths.device)
    copy(batch.cache, batch.tables, Spans(requests, torch.zeros_like(requests), rows), space[0], space[1])
    return space


def run_cuda(gqa: int, device: torch.device) -> None:
    """A decode step: store, then attention of few requests on many blocks, windows and all; and prefixes in 16 bits."""
    from oscar_kernels.cuda import prefix
    from oscar_kernels.cuda import store as cuda_store
    from oscar_kernels.cuda.decode import decode as cuda_decode
    from oscar_kernels.cuda.decode import unsupported

    shape = Shape(kv_heads=2, gqa=gqa, head_dim=128, group=128, page_size=64, windows=Windows(64, 256, 256))
    batch = filled_batch(shape, [1, 70, 700, 1500], device)
    reason = unsupported(batch.cache, shape.page_size, shape.q_heads, shape.dtype)
    if reason is not None:
        raise SystemExit(f"skipped: {reason}")
    q, k, v = (
        random_vectors((4, heads, shape.head_dim), shape.dtype, seed, device)
        for seed, heads in enumerate((shape.q_heads, shape.kv_heads, shape.kv_heads))
    )
    rotation = random_rotation(shape.head_dim, 1, device)
    cache = empty_cache(shape, 8, 4, device)
    slots = random_slots(4, shape.windows, 8 * shape.page_size, 4, device)
    for gain, matrix in ((0.0, rotation), (0.98, rotation.repeat(shape.kv_heads, 1, 1))):
        transforms = (SideTransform(matrix, clip=clip, gain=gain) for clip in (0.96, 0.92))
        layer = cuda_store.arrange(prepare(shape.format(*transforms), shape.dtype))
        q_rot = cuda_store.store(cache, slots, k, v, layer, q, shape.page_size)
    lse = torch.empty(q_rot.shape[:2], device=device)
    out = cuda_decode(batch.cache, batch.tables, q_rot, 0.1)
    assert torch.equal(cuda_decode(batch.cache, batch.tables, q_rot, 0.1, lse=lse), out)
    multiplied = cuda_decode(batch.cache, batch.tables, q_rot, 0.1, reading=layer.value.reading)
    assert torch.equal(copied(batch, prefix.copy_prefixes), copied(batch, copy_prefixes))
    torch.cuda.synchronize()
    assert torch.isfinite(multiplied).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def main() -> None:
    device = torch.device("cuda")
    if sys.argv[1:] == ["cuda"]:
        for gqa in (4, 16):  # integer and float sums of values, sixteen and eight warps
            run_cuda(gqa, device)
    else:
        for shape in SHAPES:
            run(shape, device)
    print("all cases done")


if __name__ == "__main__":
    main()
