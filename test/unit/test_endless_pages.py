"""Pages that hold NaN are not stored, whichever way a page takes there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from oscar_kernels.codec import quantize
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.layout import RowLayout
from sglang_oscar.features.tiers.finite import Column, is_finite
from sglang_oscar.features.tiers.pages import PageLayout, number_columns
from sglang_oscar.features.tiers.storage import CheckedStorage
from support.stored_pages import KEYS, LAYOUT, SALT, HostMemoryBackend, Pool, backend, files

HALF, SINGLE = torch.float16, torch.float32
FORMATS = [
    LayerFormat(2, 64, SideFormat(64), SideFormat(64)),
    LayerFormat(2, 64, SideFormat(64), SideFormat(32, HALF, bits=4)),
    LayerFormat(2, 64, SideFormat(32, SINGLE, bits=3), SideFormat(64, bits=16)),
    LayerFormat(2, 64, SideFormat(64, bits=16, exact_dtype=HALF), SideFormat(64)),
]
PAGES = PageLayout.of_formats(dict(enumerate(FORMATS)), 16)
COLUMNS = number_columns(PAGES, FORMATS)
SLOTS = torch.arange(16 * 3)
OF_TEST_PAGES = [Column(33, 36 * 16, 36, 0)]
"""One number of the first keys of every row, of :mod:`support.stored_pages`."""


def numbers(page: torch.Tensor, side: int, layer: int) -> torch.Tensor:
    """A view of the scales and zero points, or the exact numbers, of one layer and side: [tokens, numbers]."""
    row: RowLayout = (FORMATS[layer].key_layout, FORMATS[layer].value_layout)[side]
    (item,) = [item for item in PAGES.items if (item.side, item.layer) == (side, layer)]
    rows = page[item.offset : item.offset + item.size].view(PAGES.page_size, -1)
    dtype = row.exact_dtype if row.exact else row.scale_dtype
    begin = 0 if row.exact else row.params_offset
    held = rows.untyped_storage()
    return torch.empty(0, dtype=dtype).set_(
        held, (item.offset + begin) // dtype.itemsize,
        (PAGES.page_size, (row.row_bytes - begin) // dtype.itemsize), (row.row_bytes // dtype.itemsize, 1),
    )  # fmt: skip


def page() -> torch.Tensor:
    """Of codes of every byte, and finite numbers of every size."""
    made = torch.randint(0, 256, (PAGES.page_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for layer in range(len(FORMATS)):
        for side in (0, 1):
            there = numbers(made, side, layer)
            largest = 60_000.0 if there.dtype == HALF else 1e38
            sizes = torch.logspace(-30, 0, there.numel(), dtype=SINGLE).view(there.shape) * largest
            there.copy_((sizes * (1 - 2 * (torch.arange(there.numel()).view(there.shape) % 2))).to(there.dtype))
    return made


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_every_number_counts(number: float) -> None:
    """Of every layer, side, width and dtype; and of finite pages none, whatever their codes are."""
    made = page()
    view = made.numpy().data
    assert is_finite(view, COLUMNS)
    for layer in range(len(FORMATS)):
        for side in (0, 1):
            there = numbers(made, side, layer)
            for at in (0, there.shape[1] // 2, there.numel() - 1, 5 * there.shape[1] + 1):
                kept = there.flatten()[at].clone()
                there[at // there.shape[1], at % there.shape[1]] = number
                assert not is_finite(view, COLUMNS), (layer, side, at)
                there[at // there.shape[1], at % there.shape[1]] = kept
    assert is_finite(view, COLUMNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF, SINGLE])
def test_what_a_codec_makes_of_nan(dtype: torch.dtype) -> None:
    x = torch.randn(3, 64)
    x[1, 7] = math.nan
    _, scale, zero = quantize(x, 64, dtype)
    for value in (scale, zero):
        for token in range(3):
            width = dtype.itemsize
            column = Column(width - 1, width, width, int(dtype == HALF))
            assert is_finite(value[token].view(torch.uint8).numpy().data, [column]) == (token != 1)


def test_layers_alike_take_few_looks() -> None:
    """One for a number of a row, not for every layer: looking takes the interpreter's time."""
    layers = dict.fromkeys(range(36), LayerFormat(8, 128, SideFormat(128), SideFormat(128)))
    layout = PageLayout.of_formats(layers, 64)
    assert len(number_columns(layout, layers.values())) == 16


def storage(kept: Any, pool: Pool) -> CheckedStorage:
    return CheckedStorage(kept, pool, SALT, OF_TEST_PAGES)  # type: ignore[arg-type]


def pool_with(*endless: int) -> Pool:
    """Three pages of zeros, some of which hold NaN."""
    pool = Pool()
    for number in endless:
        pool.pages.page(number)[36 * 3 + 32 : 36 * 3 + 34] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    return pool


def test_files_of_other_pages_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one line for the batch, and the room of a page that is not written is free again."""
    store = storage(backend(tmp_path / "store", max_size=str(100 * LAYOUT.page_bytes)), pool_with(1))
    assert store.batch_set_v1(KEYS, SLOTS) == [True, False, True]
    assert [path.is_file() for path in files(store).values()] == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == [
        "int2 storage: 1 of 3 pages are not stored, as they hold NaN"
    ]
    assert store._evictor._total_bytes == 2 * LAYOUT.page_bytes
    store.close()


@pytest.mark.parametrize("version", [1, 2])
def test_storage_that_reads_host_memory(version: int, caplog: pytest.LogCaptureFixture) -> None:
    """Gets the pages before the first that holds NaN: what is behind would not be found."""
    pool = pool_with(1)
    kept = HostMemoryBackend(pool)
    store = storage(kept, pool)
    if version == 1:
        assert store.batch_set_v1(KEYS, SLOTS) == [True, False, False]
    else:
        transfer = PoolTransfer(PoolName.KV, host_indices=SLOTS, keys=KEYS)
        assert store.batch_set_v2([transfer]) == {PoolName.KV: [True, False, False]}
    assert set(kept.kept) == {store.key(KEYS[0])}
    assert len(caplog.records) == 1


def test_pages_as_tensors(tmp_path: Path) -> None:
    pool = pool_with(1)
    store = storage(backend(tmp_path / "store"), pool)
    pages = [pool.pages.page(number).clone() for number in range(3)]
    assert not store.batch_set(KEYS, pages)
    assert [path.is_file() for path in files(store).values()] == [True, False, False]
    assert [store.set(key, page) for key, page in zip(KEYS, pages, strict=True)] == [True, False, True]
    store.close()
