"""What ``oscar bench`` measures runs: on a GPU in small sizes, elsewhere in Triton's interpreter, where times mean
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oscar_kernels.cache import LayerCache
from oscar_kernels.codec import decode_rows
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC
from oscar_kernels.prepared import SplitMatrix
from oscar_kernels.transform import SideTransform
from oscar_kernels.triton.decode import decode
from oscar_tools.bench import decode as bench_decode
from oscar_tools.bench import extend, measure, verify
from oscar_tools.bench.loads import Load, Sizes
from oscar_tools.bench.measure import Measurement
from oscar_tools.bench.store import prepared
from oscar_tools.bench.synthetic import PAGE, WINDOWS, Heads, layouts_of, random_cache
from oscar_tools.bench.timing import read_bandwidth

TINY = Sizes(Heads(2, 1, 128), (Load(1, 330),), (Load(1, 325),), 2, (3,), ((1, 20, 9),), read=1 << 19)


def in_this_process(job: Callable[..., Any], *args: object, until: float, take: Callable[[Any], None]) -> str | None:
    """As :func:`oscar_tools.bench.jobs.run`."""
    for result in job(*args):
        take(result)
    return None


@pytest.fixture
def _small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of which no stock kernel is installed; prompts by our Triton kernel, in few heads."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (6 << 30, 8 << 30))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Stand-in")
    monkeypatch.setattr(measure.decode_baselines, "installed", lambda name: False)
    monkeypatch.setattr(extend, "served", lambda setting: extend.Served("triton", decode, None))
    monkeypatch.setattr("oscar_tools.bench.store.COPIES", 1)
    monkeypatch.setattr("oscar_tools.bench.decode.layers_of", lambda size: 1)


@pytest.mark.usefixtures("_small_card")
def test_every_kernel_is_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend, "Q_HEADS", 8)
    said: list[str] = []
    row = Measurement(said.append, in_this_process).all(TINY, 60)
    assert row["read_bandwidth_gb_s"] >= 0
    assert [(r["requests"], r["tokens"]) for r in row["decode"]] == [(1, 330)]
    for found in row["decode"]:
        assert {"k2v2_us", "k2v2_of_limit", "k3v2_us", "k3v2_of_limit"} <= set(found)
    assert [(r["requests"], r["new"], r["us"] > 0) for r in row["verify"]] == [(1, 2, True)]
    assert [(r["tokens"], r["us"] > 0) for r in row["store"]] == [(3, True)]
    assert [(r["prefix"], r["chunk"], r["kernel"]) for r in row["extend"]] == [(20, 9, "triton")]
    assert set(row["missing"]) == {"fa3", "fa3_fp8", "flashinfer", "flashinfer_fp8"}


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_outputs_are_multiplied_as_in_servers(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In decode and verification, by a matrix of each layer, in the order that the kernel reads."""
    given: list[tuple[str, SplitMatrix]] = []
    module = bench_decode.KERNELS[kernel]

    def noted(name: str) -> Callable[..., None]:
        return lambda *args, reading: given.append((name, reading))

    for name in ("decode", "verify"):
        monkeypatch.setattr(module, name, noted(name))
    monkeypatch.setattr(bench_decode, "make_workspace", lambda *args: None)
    monkeypatch.setattr(bench_decode, "layers_of", lambda size: 2)
    for timed in (bench_decode, verify):
        monkeypatch.setattr(timed, "time_us", lambda calls: float(len([call() for call in calls])))
    monkeypatch.setattr(verify, "make_workspace", lambda *args: None)
    bench_decode.decode_us(f"{kernel}:k3v2", TINY.heads, 1, 330)
    verify.verify_us(kernel, TINY.heads, 1, 325, [2])
    assert [name for name, _ in given] == ["decode"] * 4 + ["verify"] * 2 + ["decode"] * 2
    for (_, first), (_, second) in zip(given[::2], given[1::2], strict=True):
        first.check(TINY.heads.kv, torch.bfloat16, arranged=kernel == "cuda")
        assert not torch.equal(first.terms, second.terms)


@pytest.mark.parametrize(("kernel", "source"), [("cuda", "verify.cu"), ("cuda:passes", "decode.cu")])
def test_products_of_four_warps_and_passes_are_timed(kernel: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers take, and what they would take without it."""
    seen: list[str] = []

    def noted(
        cache: LayerCache, tables: object, words: torch.Tensor, q: torch.Tensor, *rest: object, **named: object
    ) -> None:
        seen.append(cuda_decode.variant_of(cache, PAGE, q.shape[1], q.dtype, drafts=words.shape[1]).source)

    monkeypatch.setattr(bench_decode.KERNELS["cuda"], "verify", noted)
    monkeypatch.setattr(bench_decode.KERNELS["cuda"], "decode", lambda *args, reading: None)
    monkeypatch.setattr(bench_decode, "layers_of", lambda size: 1)
    monkeypatch.setattr(verify, "make_workspace", lambda *args: None)
    monkeypatch.setattr(verify, "time_us", lambda calls: float(calls[0]() is None))
    verify.verify_us(kernel, Heads(16, 2, 256), 1, 330, [4], "k3v2")
    assert seen == [source]


def test_parts_of_a_layer_take_a_launch_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own heads and rows, and what is read is what both have."""
    seen: list[tuple[int, int]] = []

    def noted(cache: LayerCache, tables: object, q: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        seen.append((cache.k_layout.bits, q.shape[1]))
        return q

    heads, kernel = Heads(8, 4, 64), "triton:k3v2+k2bv2s"
    monkeypatch.setattr(bench_decode.KERNELS["triton"], "decode", noted)
    monkeypatch.setattr(bench_decode, "layers_of", lambda size: 1)
    monkeypatch.setattr(bench_decode, "time_us", lambda calls: float(calls[0]().shape[1]))
    assert bench_decode.decode_us(kernel, heads, 1, 330) == 8
    assert seen == [(3, 4), (2, 4)]
    half = Heads(4, 2, 64)
    sizes = [bench_decode.kernel_bytes(f"triton:{part}", half, 1, 330) for part in ("k3v2", "k2bv2s")]
    assert bench_decode.kernel_bytes(kernel, heads, 1, 330) == sum(sizes)
    with pytest.raises(ValueError, match="3 kv heads do not make 2 equal parts"):
        bench_decode.parts_of(kernel, Heads(3, 3, 64))


def test_codings_follow_widths() -> None:
    """Rows of such content are read back as numbers, and a layer has a codebook where they need one."""
    layouts = key, value = layouts_of("k2bv3s", 2, 64)
    assert [(of.coding, of.bits, of.group_size) for of in layouts] == [(CODEBOOK, 2, 64), (SYMMETRIC, 3, 64)]
    cache = random_cache(64, 1, layouts, WINDOWS)
    assert decode_rows(cache.k_rows, key, cache.k_codebook).isfinite().all()
    assert decode_rows(cache.v_rows, value).isfinite().all()
    assert prepared(layouts, SideTransform(), SideTransform()).key.codebook is not None
    assert {of.coding for of in layouts_of("k3v2", 2, 64)} == {AFFINE}


def test_the_bandwidth_is_of_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([40.0, 10.0, 20.0])
    monkeypatch.setattr("oscar_tools.bench.timing.time_us", lambda calls: next(took))
    assert read_bandwidth(1 << 20) == pytest.approx((1 << 20) / 10e3)
