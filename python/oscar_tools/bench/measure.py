"""The measurements of ``oscar bench`` and the row that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import sglang_oscar
from oscar_kernels.transform import SideTransform
from oscar_tools.bench import decode_baselines, extend, jobs
from oscar_tools.bench.decode import decode_us, read_bytes, rows_of, served_by
from oscar_tools.bench.loads import Load, Sizes
from oscar_tools.bench.report import command_line, driver, gpu_facts, rounded, versions
from oscar_tools.bench.store import StoreCase, prepared
from oscar_tools.bench.synthetic import layouts_of, rotation_of
from oscar_tools.bench.timing import read_bandwidth, time_us
from oscar_tools.bench.verify import verify_us
from sglang_oscar.attention.gpu import MOST_CUDA_TOKENS

WIDTHS = ("k2v2", "k3v2")
"""Bits of rows: the fewest, and the default."""
BASELINES = (("fa3", "fa3_fp8"), ("flashinfer", "flashinfer_fp8"))
"""Stock kernels, those of one process together; the last compile when they are called first."""
STOCK = {"bf16": ("fa3", "flashinfer"), "fp8": ("fa3_fp8", "flashinfer_fp8")}
"""Those by their caches."""
Result = tuple[Any, ...]


def ours(sizes: Sizes) -> Iterator[Result]:
    """Facts, sizes that fit, and microseconds of decode by the kernel that a server has here."""
    free, total = torch.cuda.mem_get_info()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    yield "facts", gpu_facts() | {"capability": capability, "memory_gib": round(total / 2**30, 1)}
    sizes = sizes.fitting(free)
    yield "sizes", sizes
    yield "bandwidth", read_bandwidth(sizes.read)
    torch.cuda.empty_cache()
    kernel = served_by(sizes.heads)
    yield "kernel", kernel
    for widths in WIDTHS:
        for load in sizes.decode:
            yield "decode", widths, load, decode_us(f"{kernel}:{widths}", sizes.heads, *load)
            torch.cuda.empty_cache()


def stock(names: list[str], sizes: Sizes) -> Iterator[Result]:
    """Microseconds of stock kernels: decode, then prompts."""
    for name in names:
        for load in sizes.decode:
            yield "decode", name, load, time_us(decode_baselines.calls_of(name, sizes.heads, *load))
            torch.cuda.empty_cache()
    for name in names:
        if name != "flashinfer_fp8":  # a server computes prompts in 16 bits then
            for case in sizes.extend:
                yield "extend", case, {f"{name}_us": extend.prefill_us(name, *case)}
                torch.cuda.empty_cache()


def others(kernel: str, sizes: Sizes) -> Iterator[Result]:
    """Microseconds of verification, store and prompts, by the kernels that a server has here."""
    for load in sizes.verify:
        times = verify_us(kernel, sizes.heads, *load, [sizes.drafts], WIDTHS[-1])
        names = {"one_us": "one", "us": f"verify_{sizes.drafts}", "apart_us": f"apart_{sizes.drafts}"}
        yield "verify", {**load._asdict(), "new": sizes.drafts, **{name: times[of] for name, of in names.items()}}
        torch.cuda.empty_cache()
    layouts = layouts_of(WIDTHS[-1], sizes.heads.kv, sizes.heads.head_dim)
    rotation = rotation_of(sizes.heads.head_dim)
    layer = prepared(layouts, SideTransform(rotation, clip=0.96), SideTransform(rotation, clip=0.92))
    for tokens in sizes.store:
        case = StoreCase(tokens, layouts, sizes.heads)
        cuda_us = case.cuda_us(layer) if tokens <= MOST_CUDA_TOKENS else case.prompt_us(layer)
        took, by = (case.triton_us(layer), "triton") if cuda_us is None else (cuda_us, "cuda")
        yield "store", {"tokens": tokens, "kernel": by, "us": took, "bf16_copy_us": case.copy_us()}
    kernels = extend.served("auto")
    for prompt in sizes.extend:
        row = extend.extend_row(prompt, kernels)
        whole = row["joined_us"] or row["us"] + row["store_us"]
        shown = {"kernel": row["backend"], "us": whole, "TFLOP/s": extend.flops(*prompt) / whole / 1e6}
        yield "extend", prompt, {**shown, "bf16_copy_us": row["copy_us"]}
        torch.cuda.empty_cache()


class Measurement:
    """What was measured so far.

    Args:
        say: called with lines for the user.
        run: :func:`jobs.run`.
    """

    def __init__(self, say: Callable[[str], None], run: Callable[..., str | None] = jobs.run) -> None:
        self._say, self._run = say, run
        self.facts: dict[str, Any] = {}
        self.sizes, self.kernel, self.bandwidth = Sizes(), "", 0.0
        self._decode: dict[str, dict[Load, float]] = {}
        self._extend: dict[tuple[int, int, int], dict[str, Any]] = {}
        self._lists: dict[str, list[dict[str, Any]]] = {"verify": [], "store": []}
        self.missing: dict[str, str] = {}

    def all(self, sizes: Sizes, seconds: float) -> dict[str, Any]:
        """Measure everything that fits into ``seconds``; returns the row.

        Raises:
            RuntimeError: our own decode kernel gave no time; says why.
        """
        begin = time.monotonic()
        until = begin + seconds
        self._do("our decode kernel", ours, sizes, until=until)
        if not self._decode:
            raise RuntimeError(self.missing["our decode kernel"])
        (first, *rest) = [[name for name in names if self._installed(name)] for names in BASELINES]
        if first:
            self._do(" and ".join(first), stock, first, self.sizes, until=until)
        self._do("verification, store and prompts", others, self.kernel, self.sizes, until=until)
        for names in filter(None, rest):
            self._do(" and ".join(names), stock, names, self.sizes, until=until)
        return self.row() | {"seconds": round(time.monotonic() - begin)}

    def _installed(self, name: str) -> bool:
        here = decode_baselines.installed(name)
        if not here:
            self.missing[name] = "not installed, or not for this GPU"
        return here

    def _do(self, what: str, job: jobs.Job, *args: object, until: float) -> None:
        self._say(f"{what} ...")
        reason = self._run(job, *args, until=until, take=self._take)
        if reason is not None:
            self.missing[what] = reason
            self._say(f"{what}: {reason}")

    def _take(self, result: Result) -> None:
        kind, *values = result
        if kind == "decode":
            name, load, us = values
            self._decode.setdefault(name, {})[load] = us
        elif kind == "extend":
            load, columns = values
            self._extend.setdefault(load, {}).update(columns)
        elif kind in self._lists:
            self._lists[kind].append(values[0])
        else:
            setattr(self, kind, values[0])

    def row(self) -> dict[str, Any]:
        """What a contributed row has."""
        heads = "x".join(map(str, self.sizes.heads))
        about = {**self.facts, "driver": driver(), "sglang-oscar": sglang_oscar.__version__, **versions()}
        extend_rows = [
            dict(zip(("requests", "prefix", "chunk"), load, strict=True)) | row for load, row in self._extend.items()
        ]
        return {
            "benchmark": "oscar bench", **about, "command": command_line("oscar"), "heads": heads,
            "read_bandwidth_gb_s": round(self.bandwidth, 1), "decode_kernel": self.kernel,
            "decode": rounded([self._decode_row(load) for load in self.sizes.decode]),
            **{kind: rounded(rows) for kind, rows in self._lists.items()}, "extend": rounded(extend_rows),
            "missing": self.missing,
        }  # fmt: skip

    def _decode_row(self, load: Load) -> dict[str, Any]:
        """Microseconds of every kernel, of ours the share of the bandwidth, and how many times as long stock ones take
        as the default's rows."""
        row: dict[str, Any] = load._asdict()
        for name, times in self._decode.items():
            if load not in times:
                continue
            row[f"{name}_us"] = times[load]
            if name in WIDTHS:
                size = read_bytes(*load, rows_of(f"{self.kernel}:{name}", self.sizes.heads))
                row[f"{name}_of_limit"] = size / times[load] / 1e3 / self.bandwidth
        for label, names in STOCK.items():
            took = [times[load] for name, times in self._decode.items() if name in names and load in times]
            if took and f"{WIDTHS[-1]}_us" in row:
                row[f"{label}_over_{WIDTHS[-1]}"] = min(took) / row[f"{WIDTHS[-1]}_us"]
        return row
