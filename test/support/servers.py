"""Real SGLang servers for tests: started as users start them, asked over HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from sglang_oscar.cpu_server import environment, has_gpu

START_TIMEOUT = 300.0
OSCAR_PREFIXES = ("SGLANG_OSCAR_", "SGLANG_MIXED_KV_", "SGLANG_ENABLE_MIXED_KV_", "DUMP_KVCACHE")
HADAMARD = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}
IDENTITY = {"SGLANG_OSCAR_K_ROTATION_PATH": "identity", "SGLANG_OSCAR_V_ROTATION_PATH": "identity"}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_environment(extra: dict[str, str]) -> dict[str, str]:
    """The process's environment without settings of int2 mode, made fit for this machine, plus ``extra``."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(OSCAR_PREFIXES)}
    base.pop("TRITON_INTERPRET", None)
    plugin_path = extra.pop("PYTHONPATH", None) if "PYTHONPATH" in extra else None
    env = environment(base) | extra
    if plugin_path:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [plugin_path, env.get("PYTHONPATH", "")]))
    return env


def command(model: Path | str, port: int, *args: str) -> list[str]:
    """Command line of a server of test size."""
    device = "cuda" if has_gpu() else "cpu"
    sizes = ["--mem-fraction-static", "0.3"] if has_gpu() else ["--mem-fraction-static", "0.2"]
    if "--max-total-tokens" not in args:
        sizes += ["--max-total-tokens", "24576"]
    base = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", device]
    return [*base, "--host", "127.0.0.1", "--port", str(port), "--random-seed", "0", *sizes, *args]


@dataclass
class Server:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def generate(self, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        """Greedy continuation of token ids through /generate, with the log probabilities of what was chosen."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | extra.pop("sampling", {})
        body = {"input_ids": ids, "sampling_params": sampling} | extra
        reply = requests.post(f"{self.url}/generate", json=body, timeout=600)
        reply.raise_for_status()
        return reply.json()

    def flush(self) -> None:
        """Empty the prefix cache; the server must be idle."""
        for _ in range(50):
            if requests.post(f"{self.url}/flush_cache", timeout=60).ok:
                return
            time.sleep(0.1)
        raise AssertionError("the cache cannot be flushed: requests are still running")

    def alive(self) -> bool:
        """Whether the server process runs and answers."""
        return self.process.poll() is None and requests.get(f"{self.url}/health", timeout=60).ok

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def serve(model: Path | str, log: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server, wait until it is ready, stop it and all its children afterwards."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(model, port, *args),
            env=server_environment(dict(env or {})),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_ready(server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(requests.RequestException):
            if "ready to roll" in server.text() and requests.get(f"{server.url}/health", timeout=5).ok:
                return
        time.sleep(0.3)
    raise AssertionError(f"server did not start (exit status {server.process.poll()}):\n{server.text()[-4000:]}")


def launch_fails(model: Path | str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Start a server that should refuse; returns exit status and output."""
    done = subprocess.run(
        command(model, free_port(), *args),
        env=server_environment(dict(env or {})),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
