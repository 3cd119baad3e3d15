"""Tables of a batch as the kernels take them, ``Tables`` in ``src/plan.cuh``."""

from __future__ import annotations

import ctypes

from oscar_kernels.cache import BatchTables
from oscar_kernels.cuda.launch import POINTER, struct

_Tables = struct("Tables", [("page_table", POINTER), ("page_stride", ctypes.c_int32), ("kv_lens", POINTER),
                            ("ring_row", POINTER), ("ring_start", POINTER), ("sink_block", POINTER),
                            ("batch", ctypes.c_int32)])  # fmt: skip


def describe(tables: BatchTables, count: int) -> ctypes.Structure:
    """Tables as a kernel's parameter.

    Args:
        tables: on the device.
        count: what the kernel plans as a request: requests, or passes over them.
    """
    names = ("kv_lens", "ring_row", "ring_start", "sink_block")
    pages, others = tables.page_table, (getattr(tables, name).data_ptr() for name in names)
    return _Tables(pages.data_ptr(), pages.stride(0), *others, count)
