"""Real SGLang servers for tests: started as users start them, asked over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from oscar_cpu.server import OUR_PREFIXES, environment, has_gpu
from oscar_tools import local_server

LAUNCH_TIMEOUT = 900.0
HADAMARD = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}
EXACT = HADAMARD | {"SGLANG_OSCAR_K_BITS": "16", "SGLANG_OSCAR_V_BITS": "16"}
"""Rows of 16 bits, which are the model's own keys and values."""
IDENTITY = {"SGLANG_OSCAR_K_ROTATION_PATH": "identity", "SGLANG_OSCAR_V_ROTATION_PATH": "identity"}
TWO_RANKS = ["--tp-size", "2", "--disable-custom-all-reduce"]
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent.so"}
"""Environment of two ranks on a CPU."""
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""One of several requests is retracted every seven steps; by default every three, so most of them compute again."""

PLUGINS = sorted(
    name
    for file in Path(__file__).parent.glob("*_plugin/*.dist-info/entry_points.txt")
    for name in re.findall(r"^(\w+) = ", file.read_text(), re.MULTILINE)
)
"""Plugins of tests."""


def server_environment(extra: dict[str, str]) -> dict[str, str]:
    """The process's environment without settings of int2 mode, made fit for this machine, plus ``extra``.

    A PYTHONPATH in ``extra`` goes in front of what the machine needs. On a CPU the plugins that SGLang's dependencies
    bring along are left out: each hook of theirs has all three processes of a server look through all modules, which is
    a fifth of its start. ``SGLANG_PLUGINS`` as in ``extra`` says otherwise: empty for all.
    """
    base = {name: value for name, value in os.environ.items() if not name.startswith(OUR_PREFIXES)}
    base.pop("TRITON_INTERPRET", None)
    env = environment(base)
    if not has_gpu():
        env["SGLANG_PLUGINS"] = ",".join(["oscar", *PLUGINS])
    paths = [extra.get("PYTHONPATH", ""), env.get("PYTHONPATH", "")]
    return env | extra | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def ranked(ranks: int) -> list[str]:
    """Arguments of a server with so many tensor-parallel ranks, without sums for which FlashInfer would compile."""
    return ["--tp-size", str(ranks), "--enforce-disable-flashinfer-allreduce-fusion"] if ranks > 1 else []


def small_sizes(args: tuple[str, ...]) -> list[str]:
    """Arguments that keep a server small, unless ``args`` say otherwise; OSCAR_TEST_SERVER_ARGS adds to them.

    On a CPU the share of memory is half, of which a server takes what its tokens need: SGLang subtracts what others
    took while it loaded from a small share, and another test's server takes gigabytes in those seconds.
    """
    sizes = ["--random-seed", "0"]
    if "--mem-fraction-static" not in args:
        sizes += ["--mem-fraction-static", "0.85" if has_gpu() else "0.5"]
    if "--max-total-tokens" not in args:
        sizes += ["--max-total-tokens", "24576"]
    return [*sizes, *shlex.split(os.environ.get("OSCAR_TEST_SERVER_ARGS", "")), *args]


class Server(local_server.LocalServer):
    """A running server, with shorthands for tests."""

    def generate(self, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        """Greedy continuation of token ids through /generate, with the log probabilities of what was chosen."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | extra.pop("sampling", {})
        body = {"input_ids": ids, "sampling_params": sampling} | extra
        reply = requests.post(f"{self.url}/generate", json=body, timeout=1500)
        reply.raise_for_status()
        return reply.json()

    def alive(self) -> bool:
        """Whether the server runs, and its scheduler answers twice: between what it receives it checks its memory."""
        try:
            return self.healthy() and all(requests.get(f"{self.url}/server_info", timeout=600).ok for _ in range(2))
        except requests.ConnectionError:
            return False


@contextlib.contextmanager
def serve(
    model: Path | str, log: Path, *args: str, env: dict[str, str] | None = None, warm_up: bool = False
) -> Iterator[Server]:
    """Start a server of test size, wait until it is ready, stop it and all its children afterwards.

    Its ranks meet at a port that no other server gets: of those that start at once, two might choose the same. SGLang's
    own first request, for which it waits for one second and more, is left out on a CPU unless ``warm_up``; its log then
    has a traceback, as it asks itself to freeze garbage collection before it listens.
    """
    arguments = ["--nccl-port", str(local_server.free_port()), *small_sizes(args)]
    if not (warm_up or has_gpu()):
        arguments.append("--skip-server-warmup")
    with local_server.serve(model, log, arguments, server_environment(dict(env or {}))) as started:
        server = Server(started.url, started.log, started.process)
        # SGLang goes on without a plugin that fails, and a test that relies on one would pass without what it tests.
        assert "Failed to execute general plugin" not in server.text()
        yield server


def refills(server: Server) -> int:
    """Sink blocks that a server computed again, by its log."""
    found = re.findall(r"int2 sink refill: \d+ blocks computed again \((\d+) since the start\)", server.text())
    return int(found[-1]) if found else 0


def compiled_calls(text: str) -> list[int]:
    """Calls of attention in every graph of torch.compile that has some, from a log with the code of graphs."""
    counts = [graph.count("torch.ops.sglang_oscar.decode") for graph in text.split("TRACED GRAPH")[1:]]
    return [count for count in counts if count]
