"""Test plugin for SGLang: watches a running int2 server. GPU_CHECKS lists what to do, with commas between.

``nan``: before every forward pass whatever padded rows of a CUDA graph use is NaN: page 0, ring 0, sink block 0.
``nan_everywhere``: the same for page 1 on, ring 1 on, sink block 1 on; a fault, to prove that NaN shows.
``sync``: PyTorch raises wherever the backend would wait for the GPU.
``wait``: the backend waits for the GPU in every decode step; a fault, to prove that this is noticed.
``noise``: queries, keys and values change by what one rounding to BF16 may change, as on another machine.
``sinks``: a sink block is NaN from when it is handed out until it is filled.
``ranks``: every pass over a prompt prints a digest of what this tensor-parallel rank believes about sinks and rows, and
one of the lengths that requests had in all passes so far, those that verify drafts included.
``memory``: prints what PyTorch holds of the GPU at start, when the backend is ready, when graphs are captured, and now
and then while it serves; and what the memory account says that pools and all beside them take.
``resume``: memory that a memory saver has brought back is NaN until the plugin clears it, and a line is printed.
``padding``: a pass over a prompt whose tokens are padded for exchange between ranks prints a line.
"""

from __future__ import annotations

import hashlib
import os

import torch

CHECKS = set(filter(None, os.environ.get("GPU_CHECKS", "").split(",")))
BACKEND = "sglang_oscar.attention.backend.OscarAttentionBackend."
ROUNDING = 2.0**-8
calls = 0
lengths = hashlib.sha256()


captured = 0
"""Passes that were seen while graphs are captured."""


def tell_memory(moment: str) -> None:
    numbers = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    print("gpu_checks: memory {} allocated {} reserved {} most {}".format(moment, *numbers), flush=True)


def building(original, configurator, plan, sizes, *args, **kwargs):
    """Around the allocation of the pool."""
    tell_memory("start")
    tokens = sizes.max_total_num_tokens + configurator.pool_page_size
    print(f"gpu_checks: account {plan.fixed_bytes + tokens * plan.token_bytes}", flush=True)
    return original(configurator, plan, sizes, *args, **kwargs)


def made(original, self, *args, **kwargs):
    """Around the making of the backend."""
    original(self, *args, **kwargs)
    tell_memory("ready")


def follow_memory(in_capture: bool) -> None:
    global captured
    if in_capture:
        captured += 1
    elif captured > 0:
        captured = -1
        tell_memory("captured")
    elif captured < 0 and calls % 20 == 0:
        tell_memory("served")


def poison(state) -> None:
    for cache in [part.cache for layer in state.layers.values() for part in layer.parts]:
        everything = "nan_everywhere" in CHECKS
        pages = slice(state.page_size, None) if everything else slice(0, state.page_size)
        rows = slice(1, None) if everything else slice(0, 1)
        for buffer in (cache.k_rows, cache.v_rows):
            buffer[pages].fill_(0xFF)  # NaN in every scale
        for window in (cache.k_ring, cache.v_ring, cache.k_sink, cache.v_sink):
            window[rows].fill_(float("nan"))


def back(original, cache, *args):
    """Around the clearing of memory that is back."""
    for of in cache.holdings.values():
        for group in of.units.groups:
            group.fill_(float("nan") if group.is_floating_point() else 0xFF)
    print("gpu_checks: resumed", flush=True)
    return original(cache, *args)


def poison_new_sinks(cache) -> None:
    """Blocks that were handed out since the last pass: in stream order, before anything fills or reads them."""
    for part in [part.cache for layer in cache.layers.values() for part in layer.parts]:
        for sinks in (part.k_sink, part.v_sink):
            sinks[cache.sinks.handed_out] = float("nan")
    cache.sinks.handed_out.clear()


def note_new_sinks() -> None:
    from sglang_oscar.memory.sink_store import SinkStore

    SinkStore.handed_out = []
    acquire_private = SinkStore.acquire_private

    def acquire_and_note(self):
        block = acquire_private(self)
        self.handed_out.append(block)
        return block

    SinkStore.acquire_private = acquire_and_note


def digest(state) -> str:
    """State of the sink store and of the rows, evictions included."""
    sinks = state.sinks
    parts = (list(sinks._block_of.items()), sinks._free, sorted(sinks._pins.items()))
    return hashlib.sha256(repr((parts, sorted(state.seats._block_of_seat.items()))).encode()).hexdigest()[:16]


def note_lengths(batch) -> None:
    """Take the lengths of a batch's requests into the digest: how many drafts a rank accepts shows in them."""
    if (lens := getattr(batch, "seq_lens", None)) is not None:
        lengths.update(repr(lens.tolist()).encode())


def metadata(original, self, *args, **kwargs):
    """Around the building of a batch's tables."""
    global calls
    calls += 1
    if calls == 1:
        print(f"gpu_checks: {','.join(sorted(CHECKS))}", flush=True)
    if "memory" in CHECKS:
        follow_memory(bool(kwargs.get("in_capture")))
    if "ranks" in CHECKS and not kwargs.get("in_capture"):
        note_lengths(args[0])
        if original.__name__ == "init_forward_metadata":
            said = f"{digest(self.cache)} {lengths.hexdigest()[:16]}"
            print(f"gpu_checks: rank {torch.distributed.get_rank()} {said}", flush=True)
    if "sinks" in CHECKS and self.cache.sinks.handed_out:
        poison_new_sinks(self.cache)
    if "nan" in CHECKS or "nan_everywhere" in CHECKS:
        poison(self.cache)
    return strict(original, self, *args, **kwargs)


def attention(original, self, q, k, v, *args, **kwargs):
    """Around attention."""
    # The batch says so: some releases hand attention the real rows only.
    if "padding" in CHECKS and original.__name__ == "forward_extend" and len(args[1].input_ids) > self.batch.tokens:
        print("gpu_checks: padded extend", flush=True)
    if "noise" in CHECKS:
        q, k, v = (
            (x.float() * (1 + ROUNDING * (2 * torch.rand_like(x, dtype=torch.float32) - 1))).to(x.dtype)
            for x in (q, k, v)
        )
    return strict(original, self, q, k, v, *args, **kwargs)


def strict(original, self, *args, **kwargs):
    """Around everything that the backend does in a forward pass."""
    if "sync" not in CHECKS:
        return original(self, *args, **kwargs)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = original(self, *args, **kwargs)
        if "wait" in CHECKS and calls > 1 and original.__name__.startswith("init"):
            self.cache.seats.ring_start.sum().item()
        return result
    finally:
        torch.cuda.set_sync_debug_mode(before)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "sinks" in CHECKS:
        note_new_sinks()
    if "memory" in CHECKS:
        HookRegistry.register("sglang_oscar.memory.build.build_pool", building, HookType.AROUND)
        HookRegistry.register(BACKEND + "__init__", made, HookType.AROUND)
    if "resume" in CHECKS:
        HookRegistry.register("sglang_oscar.memory.saver.clear", back, HookType.AROUND)
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        HookRegistry.register(BACKEND + name, metadata, HookType.AROUND)
    for name in ("forward_decode", "forward_extend"):
        HookRegistry.register(BACKEND + name, attention, HookType.AROUND)
