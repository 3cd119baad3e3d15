"""Where a decode step goes: kernel times by kind, from SGLang's own profiler of a running server."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
from decode_log import running_in

from oscar_tools.local_server import LocalServer

STEPS = 24
"""Decode steps that are recorded."""
RECORDED = "Profiling done"
"""What SGLang logs once it has written a trace."""

KINDS = {
    "store": ("oscar_store", "_store", "set_kv_buffer", "store_kvcache", "store_cache"),
    "attention": ("oscar_decode", "oscar_verify", "oscar_merge", "flashinfer::", "attn_fwd", "decode_att",
                  "_fwd_kernel", "merge", "flashattn", "prepare_varlen", "kernel_mha"),
    "matrix products": ("gemm", "gemv", "cutlass", "splitk", "nvjet", "dot_kernel"),
}  # fmt: skip
"""Parts of kernel names by kind, the first match counts; norms, rope, activations and sampling are what is left.

FlashAttention-3 is built with CUTLASS and has its name, too."""
ELEMENTWISE = ("norm", "rope", "rotary", "act_and_mul", "silu")
"""Parts of names of what is left, whatever else the names say: FlashInfer's namespace is on all of its kernels."""
INDUCTOR = re.compile(r"triton_[a-z]+_fused_(.*)")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"}
"""ATen operators; the name of a kernel that torch.compile makes lists those it was fused of."""


def kind(name: str) -> str:
    """The kind of a kernel; one that computes a product is of that kind, whatever is fused with it."""
    lowered = name.lower()
    if fused := INDUCTOR.match(lowered):
        return "matrix products" if PRODUCTS & set(fused[1].split("_")) else "other"
    if any(part in lowered for part in ELEMENTWISE):
        return "other"
    return next((k for k, parts in KINDS.items() if any(part in lowered for part in parts)), "other")


def layer_passes(names: list[str]) -> int:
    """How many times a layer ran: launches of whichever kernel of attention, or of the store, was launched most.

    Whatever else a layer launches once may be fused with something by torch.compile.
    """
    launches = Counter(name for name in names if kind(name) in ("attention", "store"))
    return max(launches.values(), default=0)


def summarize(events: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Microseconds per step by kind, time with no kernel running, and the longest kernels.

    Args:
        events: of a Chrome trace.
        layers: of the model.

    Raises:
        ValueError: the trace has no whole step.
    """
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    steps = layer_passes([name for _, _, name in kernels]) / layers
    if steps < 1:
        raise ValueError(f"the trace has {len(kernels)} kernels and not one whole step of {layers} layers")
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    busy, until = 0.0, kernels[0][0]
    for begin, end, name in kernels:
        # Launches that start early overlap their predecessor: only what they add counts.
        added = max(0.0, end - max(begin, until))
        busy += added
        by_kind[kind(name)] += added
        entry = by_name[name[:100]]
        entry[0] += end - begin
        entry[1] += 1
        until = max(until, end)
    span = until - kernels[0][0]
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:16]
    return {
        "steps": round(steps, 2),
        "us_per_step": {k: round(us / steps, 1) for k, us in sorted(by_kind.items())},
        "idle_us_per_step": round((span - busy) / steps, 1),
        "longest": [{"kernel": n, "us_per_step": round(us / steps, 1), "launches": round(c / steps, 1)}
                    for n, (us, c) in longest],
    }  # fmt: skip


class NeverAtOnceError(RuntimeError):
    """Fewer requests than were sent were decoded at once: ``running`` at most."""

    def __init__(self, running: int) -> None:
        super().__init__(f"at most {running} requests were decoded at once")
        self.running = running


def wait_for_batch(server: LocalServer, before: int, asking: Future[object], running: int) -> None:
    """Wait until the log tells of ``running`` requests that are decoded at once.

    Args:
        server: whose log.
        before: characters of the log that do not count.
        asking: what waits for the answers.
        running: requests.

    Raises:
        NeverAtOnceError: the answers came without.
    """
    most = 0
    while most < running:
        over = asking.done()
        most = max(running_in(server.text()[before:]), default=0)
        if over and most < running:
            asking.result()
            raise NeverAtOnceError(most)
        time.sleep(0.05)


def profile_steps(server: LocalServer, generate: Callable[[], object], layers: int, running: int = 0) -> dict[str, Any]:
    """Record decode steps while ``generate`` waits for a long enough answer on a cached prompt; see :func:`summarize`.

    Args:
        server: to record, on a GPU: without one SGLang's profiler ends the server.
        generate: asks, and returns once all answers are there.
        layers: of the model.
        running: requests that must be decoded at once before recording begins; 0 begins .3 s after asking.

    Raises:
        NeverAtOnceError: so many never were.
        TimeoutError: the server wrote no trace within a minute.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        before = len(server.text())
        asking = pool.submit(generate)
        if running:
            wait_for_batch(server, before, asking, running)
        else:
            time.sleep(0.3)
        body = {"output_dir": folder, "num_steps": STEPS, "activities": ["GPU"], "with_stack": False}
        requests.post(f"{server.url}/start_profile", json=body, timeout=120).raise_for_status()
        asking.result()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for path in Path(folder).rglob("*.trace.json.gz"):
                try:
                    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
                except (EOFError, json.JSONDecodeError, gzip.BadGzipFile):
                    continue
                return summarize(events, layers)
            time.sleep(0.5)
        raise TimeoutError("the server wrote no trace within a minute")
