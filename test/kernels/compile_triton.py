"""Compile the Triton kernels for GPUs that are not there:
``compile_triton.py COMPUTE_CAPABILITY,KEYS,VALUES,HEAD_DIM...``.

Keys and values are said by their bits, or as ``2:codebook`` and ``2:symmetric``. HEAD_DIM is of keys; values have 128.

Launches are turned into compilations, down to machine code, for a driver that only says what it would drive. What
Hopper's tensor cores read must follow from what is known (:mod:`machine_code`). Prints a line of kernels for each GPU.
To be run without TRITON_INTERPRET. SGLang is imported as in a server, because it puts functions of its own into Triton.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import sglang.srt.utils  # noqa: F401
import torch
from kernel_cases import Shape, empty_cache, random_rotation
from machine_code import disassemble, stray_descriptors
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from oscar_kernels.cache import BatchTables, Chunks, Copies, StoreSlots, Windows
from oscar_kernels.layout import AFFINE, EXACT
from oscar_kernels.prepared import prepare, split_matrix
from oscar_kernels.spans import Spans
from oscar_kernels.tables import Requests
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.broken_rows import zero_broken_rows_
from oscar_kernels.triton.decode import decode, verify
from oscar_kernels.triton.extend import extend
from oscar_kernels.triton.finite import make_values_finite_
from oscar_kernels.triton.merge_states import merge_states_
from oscar_kernels.triton.prefix import copy_prefixes
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.sink_logits import scale_by_sinks_
from oscar_kernels.triton.store import store
from oscar_kernels.triton.tables import fill_decode_tables

CPU = torch.device("cpu")
LARGEST_SHARED = 99 * 1024
"""Bytes of a block on the smallest GPU that is supported (8.6)."""
WITH_COPIES = 89, 90
RUN = JITFunction.run


class Absent:
    """A driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """Kernels are kept by device, each kind of GPU has its own."""
        return self._capability

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CPU


def check_descriptors(name: str, machine_code: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        stray = stray_descriptors(disassemble(Path(file.name)))
    assert not stray, f"{name} multiplies what nothing says: {stray}"


def compile_all(capability: int, keys: str, values: str, head_dim: int) -> dict[str, int]:
    """Shared memory of each kernel, in bytes."""
    (k_bits, k_coding), (v_bits, v_coding) = (
        (int(bits), coding or AFFINE) for bits, _, coding in (side.partition(":") for side in (keys, values))
    )
    driver.set_active(Absent(capability))
    compiled: dict[str, int] = {}

    def only_compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        kernel = RUN(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"][:4] == b"\x7fELF"
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= LARGEST_SHARED, (self.fn.__name__, kernel.metadata.shared)
        # Others read no descriptors, and to take them apart takes half as long as to compile them.
        if capability == 90 and "wgmma" in kernel.asm["ptx"]:
            check_descriptors(self.fn.__name__, kernel.asm["cubin"])
        compiled[self.fn.__name__] = kernel.metadata.shared
        return kernel

    JITFunction.run = only_compile
    windows = Windows(64, 256, 256)
    shape = Shape(8, 4, head_dim, head_dim & -head_dim, windows=windows, page_size=64, k_bits=k_bits, v_bits=v_bits)
    shape = replace(shape, k_coding=k_coding, v_coding=v_coding, v_head_dim=128, v_group=128)
    cache = empty_cache(shape, 4, 2, CPU)
    ones = [torch.ones(2, dtype=torch.int32) for _ in range(4)]
    tables = BatchTables(shape.page_size, torch.zeros(2, 4, dtype=torch.int32), *ones)
    q, k, out, v = (
        torch.zeros(2, heads, channels, dtype=shape.dtype)
        for channels in (shape.head_dim, shape.value_dim)
        for heads in (shape.q_heads, shape.kv_heads)
    )
    lse = torch.zeros(2, shape.q_heads)
    # Many requests whose outputs are multiplied, and a few whose are not: plans of both sizes, and both merges.
    reading = split_matrix(random_rotation(shape.value_dim, 1, CPU).repeat(shape.kv_heads, 1, 1), q.dtype)
    many = replace(
        tables, **{name: x.repeat(64, *[1] * (x.dim() - 1)) for name, x in vars(tables).items() if name != "page_size"}
    )
    decode(cache, many, q.repeat(64, 1, 1), 1.0, lse=lse.repeat(64, 1), reading=reading)
    wide = empty_cache(replace(shape, windows=Windows(64, 256, 260)), 4, 2, CPU)
    words = torch.ones(2, 4, dtype=torch.int64)
    verify(wide, tables, words, q.repeat(4, 1, 1), 1.0, lse=lse.repeat(4, 1))
    key = SideTransform(random_rotation(shape.head_dim, 1, CPU), clip=0.96, gain=0.98)
    slots = StoreSlots(*[torch.zeros(2, dtype=torch.int64)] * 3)
    made = prepare(shape.format(key, SideTransform(clip=0.9)), shape.dtype)
    # Copies are a window more; two kinds of GPU compile the store with them and two without.
    copies = Copies(k.clone(), v.clone(), slots.row) if capability in WITH_COPIES else None
    store(cache, slots, k, v, made, q=q, copies=copies)
    if capability == 90:
        # What both sides do is alike where both stay in 16 bits.
        whole = replace(shape, k_bits=EXACT, v_bits=EXACT, k_coding=AFFINE, v_coding=AFFINE)
        key, value = (SideTransform(random_rotation(shape.head_dim, seed, CPU)) for seed in (1, 2))
        store(empty_cache(whole, 4, 2, CPU), slots, k, v, prepare(whole.format(key, value), shape.dtype), q=q)
    rotate(q, split_matrix(random_rotation(shape.head_dim, 1, CPU), q.dtype))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    extend(cache, tables, Chunks(q, k, v, starts), q, 1.0, lse=lse)
    make_values_finite_(k, v)
    zero_broken_rows_(torch.zeros(2, 5))
    scale_by_sinks_(out, lse, lse[0].bfloat16(), q, torch.zeros(shape.kv_heads, shape.head_dim), 1.0)
    zeros = torch.zeros(1, dtype=torch.int32)
    copy_prefixes(cache, tables, Spans(zeros, zeros, starts[::2].contiguous()), k.clone(), v.clone())
    merge_states_(out.clone(), lse, out, lse)
    rows, slot_table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 256, dtype=torch.int32)
    fill_decode_tables(Requests(rows, rows, slot_table, ones[0], ones[1]), windows, 256, tables, slots)
    return compiled


if __name__ == "__main__":
    for case in sys.argv[1:]:
        of, keys, values, channels = case.split(",")
        print(case, *sorted(compile_all(int(of), keys, values, int(channels))), flush=True)
