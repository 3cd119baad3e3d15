"""The servers that GPU tests ask. They all start at once, because start-up takes longer than the tests."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from threading import Lock

import pytest

from sglang_oscar.attention import extend_choice
from sglang_oscar.attention.flash_attention3 import FlashAttention3
from sglang_oscar.attention.flash_attention4 import FlashAttention4
from support import golden
from support.reference import MODEL, fit_rotations
from support.servers import STRICT, Server, ranked, serve
from support.speculation import oracle
from support.together import Together

from reference_model.quantize_fp8 import quantize  # isort: skip (support.reference finds it)

SUPPORT = Path(__file__).parent
PLUGIN = {"PYTHONPATH": str(SUPPORT / "gpu_checks_plugin")}
DRAFTED = {"PYTHONPATH": os.pathsep.join([str(SUPPORT / "oracle_plugin"), PLUGIN["PYTHONPATH"]])}
DRAFTS = 8
"""Tokens that a step verifies."""
ORACLE = oracle(DRAFTS)
EXTEND = "SGLANG_OSCAR_EXTEND_BACKEND"
STOCK_KERNELS = {
    "fa3": ("FlashAttention-3", FlashAttention3.missing(128)),
    "fa4": ("FlashAttention-4", FlashAttention4.missing(128)),
    "flashinfer": ("FlashInfer", None if importlib.util.find_spec("flashinfer") else "FlashInfer is not installed"),
}
"""Kernels for prompts that int2 mode takes from others: their names in logs, and why they cannot be had here for the
reference model."""


@dataclass(frozen=True)
class Launch:
    """How a server of the fleet is started."""

    args: tuple[str, ...] = golden.WHOLE
    env: dict[str, str] = field(default_factory=dict)
    model: Callable[[Path], Path] = lambda folder: MODEL
    rotations: Callable[[Path], dict[str, str]] = lambda folder: golden.ROTATIONS
    running: int = 128
    """Requests at once; there are twice as many sink blocks."""
    tokens: int = 262144
    """Tokens that the pool holds."""
    ranks: int = 1
    texts: bool = False
    """Whether it gets the CPU server's answers to draft from (``support/oracle_plugin``)."""


def checked(*what: str) -> dict[str, str]:
    """Environment of a server that the test plugin watches."""
    return PLUGIN | {"GPU_CHECKS": ",".join(what)}


def focused(own: Path) -> dict[str, str]:
    """Rotation files of the recipe focus, with a transform for every kv head: fitted once, for all of the fleet."""
    with _fitting:
        return _fit_focused(own.parent)


_fitting = Lock()


@cache
def _fit_focused(folder: Path) -> dict[str, str]:
    return fit_rotations(folder, recipe="focus")


FLEET = {
    "plain": Launch(env=STRICT),
    "per_head": Launch(env=STRICT, rotations=focused),
    "by_layer": Launch(env=STRICT, rotations=golden.rotations_by_layer),
    "by_head": Launch(env=STRICT | checked("nan", "sync"), rotations=golden.rotations_by_head),
    "by_layer_speculating": Launch(
        args=(*golden.WHOLE, *ORACLE),
        env=STRICT | checked("nan", "sync") | DRAFTED,
        rotations=golden.rotations_by_layer,
        texts=True,
    ),
    "triton": Launch(env={EXTEND: "triton", "SGLANG_OSCAR_DECODE_BACKEND": "triton"}),
    "triton_extend": Launch(env={EXTEND: "triton"}),
    "fa3": Launch(args=golden.CHUNKED, env=STRICT | checked("nan", "sync") | {EXTEND: "fa3"}),
    "flashinfer": Launch(args=golden.CHUNKED, env=STRICT | checked("nan", "sync") | {EXTEND: "flashinfer"}),
    "triton_decode": Launch(env={"SGLANG_OSCAR_DECODE_BACKEND": "triton"}),
    "chunked": Launch(args=golden.CHUNKED, env=STRICT),
    "mixed": Launch(args=(*golden.CHUNKED, "--enable-mixed-chunk"), env=STRICT),
    "retract": Launch(env=STRICT | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}),
    "compiled": Launch(
        args=(*golden.WHOLE, "--enable-torch-compile", "--torch-compile-max-bs", "2"),
        env=STRICT | {"TORCH_LOGS": "graph_breaks,graph_code", "TORCHINDUCTOR_ENABLE_PDL": "1"},
    ),
    "watched": Launch(env=checked("nan", "sync")),
    # SGLang's own warm-up would end with an error, and the server with it.
    "broken_by_nan": Launch(args=(*golden.WHOLE, "--skip-server-warmup"), env=checked("nan_everywhere")),
    "broken_by_wait": Launch(env=checked("sync", "wait")),
    "refilled": Launch(env=STRICT | checked("sinks"), running=2),
    "many_beginnings": Launch(env=STRICT | checked("sinks") | {"SGLANG_MIXED_KV_RECENT_TOKENS": "64"}, running=8),
    "speculating": Launch(args=(*golden.WHOLE, *ORACLE), env=STRICT | checked("nan", "sync") | DRAFTED, texts=True),
    "speculating_triton": Launch(
        args=(*golden.CHUNKED, *ORACLE),
        env=STRICT | {"SGLANG_OSCAR_DECODE_BACKEND": "triton", "SGLANG_TEST_RETRACT": "1"} | DRAFTED,
        texts=True,
    ),
    "account": Launch(args=(*golden.WHOLE, *ORACLE), env=checked("memory") | DRAFTED, running=64, texts=True),
    "account_triton": Launch(
        args=(*golden.WHOLE, *oracle(64)),
        env=checked("memory") | DRAFTED | {"SGLANG_OSCAR_DECODE_BACKEND": "triton"},
        running=256,
        texts=True,
    ),
    "fp8_block": Launch(model=lambda folder: quantize("block", folder / "block")),
    "fp8_tensor": Launch(model=lambda folder: quantize("tensor", folder / "tensor")),
}
ON_RANKS = {
    # Far less than 64 documents take: prefixes and sink blocks are evicted all the time.
    "plain": (replace(FLEET["plain"], running=8, tokens=24576), (2, 4)),
    "refilled": (FLEET["refilled"], (2, 4)),
    "per_head": (FLEET["per_head"], (2, 4)),
    "by_head": (FLEET["by_head"], (2,)),
    "by_layer_speculating": (FLEET["by_layer_speculating"], (2, 4)),
    "fa3": (FLEET["fa3"], (2,)),
    "retract": (FLEET["retract"], (2, 4)),
    "speculating": (FLEET["speculating"], (2, 4)),
}
"""Servers that are started on several GPUs, too, and on how many."""


def on_ranks(launch: Launch, ranks: int) -> Launch:
    """The server on several GPUs, each of which says what it believes."""
    checks = filter(None, (launch.env.get("GPU_CHECKS"), "ranks"))
    return replace(launch, ranks=ranks, env=PLUGIN | launch.env | {"GPU_CHECKS": ",".join(checks)})


FLEET |= {f"{name}_on_{n}": on_ranks(launch, n) for name, (launch, numbers) in ON_RANKS.items() for n in numbers}
LOG = ("--decode-log-interval", "1", "--enable-cache-report")


def prompts_by_default() -> str:
    """The kernel for prompts that a server takes here unless it is told, as its log names it."""
    chosen = str(extend_choice.choose("auto", "cuda", (128,), sink_logits=False))
    return STOCK_KERNELS.get(chosen, ("Triton",))[0]


def lacking(launch: Launch) -> str | None:
    """Why a server cannot have the kernel that it asks for by name."""
    return STOCK_KERNELS.get(launch.env.get(EXTEND, ""), ("", None))[1]


class Fleet(Together):
    """Starts servers of :data:`FLEET` by their names."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__({name: partial(start, name, folder) for name in names})
        self.logs = {name: folder / f"{name}.log" for name in names}


def each(*names: str) -> pytest.MarkDecorator:
    """The test is run for each of these servers."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.uses(name)) for name in names])


def start(name: str, folder: Path) -> AbstractContextManager[Server]:
    """Start a server of the fleet; its files are in ``folder``."""
    launch = FLEET[name]
    own = folder / name
    own.mkdir()
    env = launch.rotations(own) | launch.env
    if launch.texts:
        (own / "texts.json").write_text(json.dumps(golden.texts()))
        env |= {"ORACLE_TEXTS": str(own / "texts.json")}
    # Pools are small; the fraction is of what the GPU has free while the rest of the fleet is on it, too.
    memory = ("--mem-fraction-static", "0.85", "--max-total-tokens", str(launch.tokens))
    running = ("--max-running-requests", str(launch.running))
    args = (*golden.ARGS, *launch.args, *memory, *running, *ranked(launch.ranks), *LOG)
    return serve(launch.model(own), folder / f"{name}.log", *args, env=env)
