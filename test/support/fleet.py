"""The servers that GPU tests ask. They all start at once, because start-up takes longer than the tests."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support import golden
from support.reference import MODEL
from support.servers import STRICT, Server, serve

from reference_model.quantize_fp8 import quantize  # isort: skip (support.reference finds it)

SUPPORT = Path(__file__).parent
PLUGIN = {"PYTHONPATH": str(SUPPORT / "gpu_checks_plugin")}
DRAFTED = {"PYTHONPATH": os.pathsep.join([str(SUPPORT / "oracle_plugin"), PLUGIN["PYTHONPATH"]])}
DRAFTS = 8
"""Tokens that a step verifies."""
ORACLE = ("--speculative-algorithm", "ORACLE", "--speculative-num-draft-tokens", str(DRAFTS))
ORACLE += ("--speculative-ngram-max-trie-depth", "100000")
FLASHINFER = importlib.util.find_spec("flashinfer") is not None


@dataclass(frozen=True)
class Launch:
    """How a server of the fleet is started."""

    args: tuple[str, ...] = golden.WHOLE
    env: dict[str, str] = field(default_factory=dict)
    model: Callable[[Path], Path] = lambda folder: MODEL
    rotations: Callable[[Path], dict[str, str]] = lambda folder: golden.ROTATIONS
    running: int = 128
    """Requests at once; there are twice as many sink blocks."""
    texts: bool = False
    """Whether it gets the CPU server's answers to draft from (``support/oracle_plugin``)."""


def checked(*what: str) -> dict[str, str]:
    """Environment of a server that the test plugin watches."""
    return PLUGIN | {"GPU_CHECKS": ",".join(what)}


FLEET = {
    "plain": Launch(env=STRICT),
    "by_layer": Launch(env=STRICT, rotations=golden.rotations_by_layer),
    "by_layer_speculating": Launch(
        args=(*golden.WHOLE, *ORACLE),
        env=STRICT | checked("nan", "sync") | DRAFTED,
        rotations=golden.rotations_by_layer,
        texts=True,
    ),
    "triton": Launch(env={"SGLANG_OSCAR_EXTEND_BACKEND": "triton", "SGLANG_OSCAR_DECODE_BACKEND": "triton"}),
    "triton_extend": Launch(env={"SGLANG_OSCAR_EXTEND_BACKEND": "triton"}),
    "fa3": Launch(args=golden.CHUNKED, env=STRICT | checked("nan", "sync") | {"SGLANG_OSCAR_EXTEND_BACKEND": "fa3"}),
    "triton_decode": Launch(env={"SGLANG_OSCAR_DECODE_BACKEND": "triton"}),
    "chunked": Launch(args=golden.CHUNKED, env=STRICT),
    "mixed": Launch(args=(*golden.CHUNKED, "--enable-mixed-chunk"), env=STRICT),
    "retract": Launch(env=STRICT | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}),
    "online": Launch(env={"SGLANG_OSCAR_ABSORB_V_ROTATION": "0"}),
    "compiled": Launch(
        args=(*golden.WHOLE, "--enable-torch-compile", "--torch-compile-max-bs", "2"),
        env=STRICT | {"TORCH_LOGS": "graph_breaks,graph_code", "TORCHINDUCTOR_ENABLE_PDL": "1"},
    ),
    "watched": Launch(env=checked("nan", "sync")),
    "broken_by_nan": Launch(env=checked("nan_everywhere")),
    "broken_by_wait": Launch(env=checked("sync", "wait")),
    "refilled": Launch(env=STRICT | checked("sinks"), running=2),
    "many_beginnings": Launch(env=STRICT | checked("sinks") | {"SGLANG_MIXED_KV_RECENT_TOKENS": "64"}, running=8),
    "speculating": Launch(args=(*golden.WHOLE, *ORACLE), env=STRICT | checked("nan", "sync") | DRAFTED, texts=True),
    "speculating_triton": Launch(
        args=(*golden.CHUNKED, *ORACLE),
        env=STRICT | {"SGLANG_OSCAR_DECODE_BACKEND": "triton", "SGLANG_TEST_RETRACT": "1"} | DRAFTED,
        texts=True,
    ),
    "fp8_block": Launch(model=lambda folder: quantize("block", folder / "block")),
    "fp8_tensor": Launch(model=lambda folder: quantize("tensor", folder / "tensor")),
}
MEMORY = ("--mem-fraction-static", "0.85", "--max-total-tokens", "262144")
"""The pools are small; the fraction is of what the GPU has free while the rest of the fleet is on it, too."""
LOG = ("--decode-log-interval", "1", "--enable-cache-report")


class Fleet:
    """Starts servers together; each is waited for when it is asked for."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self._stack = contextlib.ExitStack()
        self._starters = ThreadPoolExecutor(len(names) or 1)
        self._servers: dict[str, Future[Server]] = {
            name: self._starters.submit(self._start, name, folder) for name in names
        }
        self.logs = {name: folder / f"{name}.log" for name in names}

    def _start(self, name: str, folder: Path) -> Server:
        launch = FLEET[name]
        own = folder / name
        own.mkdir()
        env = launch.rotations(own) | launch.env
        if launch.texts:
            (own / "texts.json").write_text(json.dumps(golden.texts()))
            env |= {"ORACLE_TEXTS": str(own / "texts.json")}
        running = ("--max-running-requests", str(launch.running))
        args = (*golden.ARGS, *launch.args, *MEMORY, *running, *LOG)
        server = serve(launch.model(own), folder / f"{name}.log", *args, env=env)
        return self._stack.enter_context(server)

    def __getitem__(self, name: str) -> Server:
        return self._servers[name].result()

    def close(self) -> None:
        """Stop all servers."""
        for server in self._servers.values():
            with contextlib.suppress(Exception):
                server.result()
        self._stack.close()
