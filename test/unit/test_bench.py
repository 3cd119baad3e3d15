"""``oscar bench`` without a GPU: sizes that fit, the row, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from oscar_tools.bench import decode_baselines, jobs, measure
from oscar_tools.bench.command import summary
from oscar_tools.bench.loads import Load, Sizes
from oscar_tools.bench.measure import Measurement
from oscar_tools.cli import app

GIB = 1 << 30
FACTS = {"gpu": "NVIDIA Stand-in", "capability": "8.9", "torch": "2", "triton": "3"}


@pytest.mark.parametrize(
    ("gib", "decode"),
    [
        (78, [(1, 100_000), (8, 32_768), (32, 32_768), (32, 100_000)]),
        (23, [(1, 100_000), (8, 32_768), (32, 32_768), (8, 100_000)]),
        (7, [(1, 100_000), (8, 32_768), (2, 100_000)]),
        (1, [(1, 25_000), (1, 32_768)]),
    ],
)
def test_sizes_follow_the_memory(gib: int, decode: list[tuple[int, int]]) -> None:
    """A load takes four times its BF16 cache or more, and no load is measured twice."""
    sizes = Sizes().fitting(gib * GIB)
    assert [tuple(load) for load in sizes.decode] == decode
    assert sizes.read == min(2 * GIB, gib * GIB // 4)


def stand_in(job: Callable[..., Any], *args: Any, until: float, take: Callable[[Any], None]) -> str | None:
    """A card of 1,000 GB/s with FlashInfer, on which one process ran out of time."""
    if job is measure.ours:
        sizes = Sizes(decode=(Load(1, 1320),))
        for result in (("facts", FACTS), ("sizes", sizes), ("bandwidth", 1000.0), ("kernel", "triton")):
            take(result)
        take(("decode", "k2v2", Load(1, 1320), 4.0))
        take(("decode", "k3v2", Load(1, 1320), 5.0))
        return None
    if job is measure.stock:
        assert args[0] == ["flashinfer", "flashinfer_fp8"]
        take(("decode", "flashinfer", Load(1, 1320), 12.5))
        return jobs.OUT_OF_TIME
    take(("extend", (1, 0, 8), {"kernel": "fa3", "us": 3.0}))
    return None


def test_the_row_and_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_baselines, "installed", lambda name: name.startswith("flashinfer"))
    said: list[str] = []
    row = Measurement(said.append, stand_in).all(Sizes(), 100)
    (decode,) = row["decode"]
    # 1,000 rows of 8 heads, 2 bits and a scale and zero point of 16 bits per side; 320 tokens in 16 bits.
    size = 1000 * 2 * 8 * (32 + 4) + 320 * 2 * 8 * 128 * 2
    more = 1000 * 8 * 16  # bits of keys
    assert decode == {
        "requests": 1, "tokens": 1320, "k2v2_us": 4.0, "k2v2_of_limit": round(size / 4e6, 3), "k3v2_us": 5.0,
        "k3v2_of_limit": round((size + more) / 5e6, 3), "flashinfer_us": 12.5, "bf16_over_k3v2": 2.5,
    }  # fmt: skip
    assert row["missing"] == {
        "fa3": "not installed, or not for this GPU",
        "fa3_fp8": "not installed, or not for this GPU",
        "flashinfer and flashinfer_fp8": jobs.OUT_OF_TIME,
    }
    assert row["extend"] == [{"requests": 1, "prefix": 0, "chunk": 8, "kernel": "fa3", "us": 3.0}]
    assert {"gpu", "driver", "torch", "triton", "sglang-oscar", "command"} <= set(row)
    text = "\n".join(summary(row))
    assert "NVIDIA Stand-in: the triton kernel reads at 40% to 47% of 1,000 GB/s" in text
    assert "left out: flashinfer and flashinfer_fp8 (out of time)" in text
    json.dumps(row)


def test_a_kernel_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no kernel image"):
        Measurement(print, lambda job, *args, **options: "no kernel image").all(Sizes(), 10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "error: oscar bench needs an NVIDIA GPU that PyTorch can use; oscar doctor says what is missing"
    ]


def test_where_to_write_is_checked_first(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "none" / "row.json")])
    assert done.exit_code == 2
    assert "does not exist" in done.output
