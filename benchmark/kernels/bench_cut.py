"""Ways to decode a layer cut by kv head: checks and times each; see ``cut_sources.py``.

    python benchmark/kernels/bench_cut.py --json FILE

A worker of its own has every kind of heads and pair of widths; when one ends without a word or takes too long, the way
that it was at is left out and another goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from ctypes import c_int
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cut_sources

from oscar_kernels.cache import BatchTables, LayerCache, Windows
from oscar_kernels.cuda import decode as cuda
from oscar_kernels.cuda.launch import launch, processors
from oscar_kernels.cuda.variant import MAX_BATCH
from oscar_kernels.prepared import Output, SplitMatrix
from oscar_kernels.visible import causal_words
from oscar_tools.bench.decode import readings_of
from oscar_tools.bench.synthetic import Heads, layouts_of, random_cache, shuffled_tables
from oscar_tools.bench.timing import device, layers_of, time_us

CASES = [(heads, pair) for pair in ("k3v2+k2v2", "k3v2+k4v2") for heads in ("12x2x128", "32x8x128")]
SHAPES = [(1, 100000), (1, 30000), (8, 32768), (32, 32768)]
WAYS = ["whole", "today", "two", "cut", "cut_equal", "cut_mid", "follow", "follow_equal", "streams", "streams_overlap"]
"""``whole`` is the first width for all heads; ``two`` is today's launches that write into one output."""
PLAIN = ("whole", "today", "two")
WINDOWS = Windows(64, 256, 256)
DRAFTS = 4


class Call:
    """What one part of a layer is decoded with."""

    def __init__(
        self, cache: LayerCache, tables: BatchTables, q: torch.Tensor, sm_scale: float, out: torch.Tensor,
        workspace: torch.Tensor, lse: torch.Tensor | None, reading: SplitMatrix | None, visible: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.cache, self.q, self.out, self.workspace, self.lse = cache, q, out, workspace, lse
        self.kept = tables, reading, visible
        drafts = 0 if visible is None else visible.shape[1]
        self.variant = cuda.variant_of(cache, tables.page_size, q.shape[1], q.dtype, lse is not None, drafts, reading)
        found: list[Any] = []
        with patch.object(cuda, "launch", lambda *given, **_: found.append(given)):
            cuda._attend(cache, tables, visible, q, sm_scale, workspace, Output(out, lse, reading))
        self.kernel, _, self.threads, self.shared, self.arguments = found[0]
        self.bytes = cache.k_layout.row_bytes + cache.v_layout.row_bytes

    def run(self, blocks: int = 0, kernel: Any = None, overlap: bool = True) -> torch.Tensor:
        grid = (blocks or processors(0), 1, 1)
        launch(kernel or self.kernel, grid, self.threads, self.shared, self.arguments, overlap=overlap)
        return self.out


_side: list[torch.cuda.Stream] = []


def shares(way: str, first: Call, second: Call) -> tuple[int, int]:
    """Blocks of both parts."""
    by_bytes, all_blocks = first.bytes / (first.bytes + second.bytes), processors(0)
    of = {"equal": 0.5, "mid": (0.5 + by_bytes) / 2}.get(way.partition("_")[2], by_bytes)
    own = round(all_blocks * of)
    return own, all_blocks - own


def run(way: str, first: Call, second: Call) -> None:
    """One layer."""
    if way in PLAIN:
        found = [first.run(), second.run()]
        if way == "today":
            torch.cat(found, 1)
        return
    own, other = shares(way, first, second)
    kind = way.partition("_")[0]
    if kind == "narrow":
        first.run(own)
        second.run(other)
    elif kind == "cut":
        shared = max(first.shared, second.shared)
        kernel = cut_sources.loaded(cut_sources.cut(first.variant, second.variant), shared)
        arguments = [*first.arguments, *second.arguments, c_int(own)]
        launch(kernel, (own + other, 1, 1), first.threads, shared, arguments, overlap=True)
    elif kind == "follow":
        first.run(own)
        second.run(other, cut_sources.loaded(cut_sources.follower(second.variant), second.shared))
    else:
        if not _side:
            _side.append(torch.cuda.Stream())
        main, side, overlap = torch.cuda.current_stream(), _side[0], way == "streams_overlap"
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second.run(other, overlap=overlap)
        first.run(own, overlap=overlap)
        main.wait_stream(side)


def parts_of(heads: Heads, pair: str) -> list[tuple[str, Heads]]:
    widths = pair.split("+")
    own = Heads(heads.query // len(widths), heads.kv // len(widths), heads.head_dim)
    return [(of, own) for of in widths]


def calls_of(
    heads: Heads, pair: str, lengths: list[int], layers: int, lse: bool = False, multiplied: bool = True,
    drafts: int = 0, windows: Windows = WINDOWS, starts: bool = False,
) -> list[tuple[Call, ...]]:  # fmt: skip
    """The parts of every layer, which write into one output."""
    batch, parts = len(lengths), parts_of(heads, pair)
    tables, slots = shuffled_tables(lengths, 64)
    if starts:
        tables.ring_start.copy_((tables.kv_lens - 100).clamp(min=0))
    tokens = batch * max(drafts, 1)
    visible = causal_words(drafts, device()).repeat(batch, 1) if drafts else None
    q = torch.randn(tokens, heads.query, heads.head_dim, device=device()).bfloat16()
    out = torch.empty_like(q)
    queries = [own.contiguous() for own in q.chunk(len(parts), 1)]
    outs = list(out.chunk(len(parts), 1))
    made: list[list[Call]] = [[] for _ in range(layers)]
    for number, (widths, own) in enumerate(parts):
        layouts = layouts_of(widths, own.kv, own.head_dim)
        readings: list[Any] = readings_of("cuda", own, layers) if multiplied else [None] * layers
        caches = [random_cache(slots, batch, layouts, windows, seed + 10 * number) for seed in range(layers)]
        workspace = cuda.make_workspace(caches[0], own.query, batch, drafts)
        sums = torch.empty(tokens, own.query, device=device()) if lse else None
        for calls, cache, reading in zip(made, caches, readings, strict=True):
            calls.append(
                Call(cache, tables, queries[number], own.sm_scale, outs[number], workspace, sums, reading, visible)
            )
    return [tuple(calls) for calls in made]


def check_cases(heads: Heads, pair: str) -> list[tuple[str, Callable[[], list[tuple[Call, ...]]]]]:
    """Batches, as they are made."""
    mixed = [0, 1, 63, 64, 65, 319, 320, 321, 400, 1000, 5000, 20000]
    many = [(i * 977) % 9000 for i in range(32)]
    plain: dict[str, list[int]] = {
        "nothing": [0], "short": [5], "200": [200], "100K": [100000], "mixed": mixed, "32": many, "no work": [0, 0, 0],
        "8 x 32K": [32768] * 8, "unequal": [100000, 1, 0, 3000],
    }  # fmt: skip
    cases = [(name, partial(calls_of, heads, pair, lengths, 1)) for name, lengths in plain.items()]
    cases.append(("ring starts", partial(calls_of, heads, pair, mixed, 1, starts=True)))
    for name in ("short", "100K", "mixed", "32"):
        cases.append((f"{name}, sums", partial(calls_of, heads, pair, plain[name], 1, lse=True, multiplied=False)))
    for name in ("short", "100K", "mixed", "32"):
        more = {"drafts": DRAFTS, "windows": Windows(64, 256, 256 + DRAFTS)}
        cases.append((f"{name}, verified", partial(calls_of, heads, pair, plain[name], 1, lse=True, **more)))
    return cases


def found_of(calls: tuple[Call, ...]) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    tensors = [tensor for call in calls for tensor in (call.out, call.lse) if tensor is not None]
    return [tensor.clone() for tensor in tensors]


def blank(calls: tuple[Call, ...]) -> None:
    for call in calls:
        call.out.fill_(float("nan"))
        call.workspace[MAX_BATCH:] = float("nan")
        if call.lse is not None:
            call.lse.fill_(float("nan"))


def check(way: str, heads: Heads, pair: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Against the plain kernel with as many blocks, bit for bit, and against today's; in a graph, many times."""
    worst = 0.0
    for name, make in check_cases(heads, pair):
        (calls,) = make()
        share = way.partition("_")[2] in ("", "overlap")
        same_cut = "narrow" if share else f"narrow_{way.partition('_')[2]}"
        wanted = {}
        for other in ("today", same_cut):
            blank(calls)
            run(other, *calls)
            wanted[other] = found_of(calls)
        exact = wanted["today" if way in PLAIN else same_cut]
        blank(calls)
        run(way, *calls)
        runs = [found_of(calls)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                run(way, *calls)
        for _ in range(5):
            blank(calls)
            graph.replay()
            runs.append(found_of(calls))
        for number, found in enumerate(runs):
            for one, other in zip(found, exact, strict=True):
                if not torch.equal(one, other):
                    raise AssertionError(f"{name}: run {number} differs, {(one != other).sum()} of {one.numel()}")
        for call in calls:
            if call.workspace[:MAX_BATCH].view(torch.int32).any():
                raise AssertionError(f"{name}: counters are not zero")
        for one, other in zip(runs[0], wanted["today"], strict=True):
            finite = other.isfinite()
            norm = float(other[finite].double().norm())
            if norm:
                worst = max(worst, float((one[finite].double() - other[finite].double()).norm()) / norm)
            if not torch.equal(one[~finite], other[~finite]):
                raise AssertionError(f"{name}: what is not finite differs")
    say({"way": way, "checked": len(check_cases(heads, pair)), "worst_from_today": worst})


def whole_us(heads: Heads, widths: str, lengths: list[int], layers: int) -> float:
    """All heads of one width."""
    tables, slots = shuffled_tables(lengths, 64)
    q = torch.randn(len(lengths), heads.query, heads.head_dim, device=device()).bfloat16()
    out = torch.empty_like(q)
    layouts = layouts_of(widths, heads.kv, heads.head_dim)
    caches = [random_cache(slots, len(lengths), layouts, WINDOWS, seed) for seed in range(layers)]
    workspace = cuda.make_workspace(caches[0], heads.query, len(lengths))
    readings = readings_of("cuda", heads, layers)
    return time_us([
        partial(cuda.decode, cache, tables, q, heads.sm_scale, out, workspace, reading=reading)
        for cache, reading in zip(caches, readings, strict=True)
    ])  # fmt: skip


def work(heads: Heads, pair: str, phase: str, ways: list[str], done: set[tuple[str, str]]) -> None:
    """Check or time; print a line of JSON before and after everything."""

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)

    failed = set()

    def attempt(way: str, what: str, do: Callable[[], None]) -> None:
        if way in failed or (way, what) in done:
            return
        say({"begin": [way, what]})
        try:
            do()
            torch.cuda.synchronize()
        except Exception as error:
            failed.add(way)
            say(
                {
                    "way": way,
                    "at": what,
                    "failed": f"{type(error).__name__}: {error}"[:500],
                    "where": traceback.format_exc()[-700:],
                }
            )
            torch.cuda.synchronize()  # a broken context ends this process
        say({"end": [way, what]})

    if phase == "check":
        for way in ways:
            if way != "whole":
                attempt(way, "check", partial(check, way, heads, pair, say))
        return
    for batch, length in SHAPES:
        parts = parts_of(heads, pair)
        rows = sum(side.row_bytes for widths, own in parts for side in layouts_of(widths, own.kv, own.head_dim))
        layers = layers_of(batch * length * rows)
        calls = calls_of(heads, pair, [length] * batch, layers)
        for way in ways:

            def timed(way: str = way) -> None:
                if way == "whole":
                    took = [whole_us(heads, pair.partition("+")[0], [length] * batch, layers)]
                else:
                    took = [time_us([partial(run, way, *layer) for layer in calls]) for _ in range(2)]
                say({"way": way, "batch": batch, "length": length, "us": [round(us, 2) for us in took]})

            attempt(way, f"{batch}x{length}", timed)
        del calls
        torch.cuda.empty_cache()


def supervise(heads: str, pair: str, phase: str, ways: list[str], rows: list[dict[str, Any]], until: float) -> None:
    """Run workers until every way has been tried, each of which the ways that broke the one before are left out of."""
    done: list[list[str]] = []
    while ways:
        rest = until - time.monotonic()
        if rest < 5:
            rows.append({"heads": heads, "pair": pair, "failed": f"no time is left to {phase} {ways}"})
            return
        command = [
            sys.executable,
            __file__,
            "--work",
            heads,
            pair,
            phase,
            "--ways",
            ",".join(ways),
            "--done",
            json.dumps(done),
        ]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, error = worker.communicate(timeout=min(rest, 60))
            why = f"ended with {worker.returncode}: {error[-1500:]}"
        except subprocess.TimeoutExpired:
            worker.kill()
            out, error = worker.communicate()
            why = f"took too long: {error[-500:]}"
        broken: set[str] = set()
        at: list[str] | None = None
        for line in out.splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "begin" in row:
                at = row["begin"]
            elif "end" in row:
                done.append(row["end"])
                at = None
            else:
                if "failed" in row:
                    broken.add(row["way"])
                rows.append({"heads": heads, "pair": pair, **row})
                print(json.dumps(rows[-1]), flush=True)
        if worker.returncode == 0:
            return
        if at is not None:
            broken.add(at[0])
        rows.append({"heads": heads, "pair": pair, "phase": phase, "at": at, "failed": why})
        print(json.dumps(rows[-1]), flush=True)
        if not broken:
            return
        ways = [way for way in ways if way not in broken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="cut.json")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--work", nargs=3, help="heads, widths and what a worker does")
    parser.add_argument("--done", default="[]")
    parser.add_argument("--seconds", type=float, default=170, help="for everything")
    args = parser.parse_args()
    ways = args.ways.split(",")
    if args.work:
        done = {(way, what) for way, what in json.loads(args.done)}
        work(Heads.parse(args.work[0]), *args.work[1:], ways, done)
        return
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []

    def write() -> None:
        Path(args.json).write_text(
            json.dumps({"command": sys.argv, "torch": torch.__version__, "rows": rows}, indent=1)
        )

    checks = [
        threading.Thread(target=supervise, args=(heads, pair, "check", ways, rows, begin + args.seconds * 0.6))
        for heads, pair in CASES
    ]
    for thread in checks:
        thread.start()
    for thread in checks:
        thread.join()
    write()
    print(f"checks: {time.monotonic() - begin:.0f} s", flush=True)
    for heads, pair in CASES:
        hung = {row["at"][0] for row in rows if row.get("at") and isinstance(row["at"], list) and row["heads"] == heads}
        supervise(heads, pair, "time", [way for way in ways if way not in hung], rows, begin + args.seconds)
        write()
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
