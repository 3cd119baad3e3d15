"""Starting a stock SGLang server on this machine and waiting until it is ready.

Used by the quickstart, the evaluation drivers and the tests; the server itself is started exactly as a user would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oscar_cpu.server import environment, has_gpu

START_VARIABLE = "OSCAR_START_TIMEOUT"
START_TIMEOUT = 1800.0
"""Seconds that a server may take to start, unless the variable says otherwise: large models load for minutes."""
READY = "The server is fired up and ready to roll!"


class ServerFailedError(RuntimeError):
    """The server ended, or did not become ready in time. The message ends with its last log lines."""


@dataclass
class LocalServer:
    """A running server.

    Attributes:
        url: base address, without a path.
        log: file with its output.
        process: its main process, leader of a process group of its own.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def healthy(self) -> bool:
        """Whether the server runs and answers."""
        if self.process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply:
                return reply.status == 200
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def wait_ready(self, timeout: float | None = None, given_up: threading.Event | None = None) -> None:
        """Wait until the server has warmed up.

        Args:
            timeout: seconds; None for those of :func:`start_timeout`.
            given_up: set by another thread where nobody wants the server any more.

        Raises:
            ServerFailedError: it ended, took longer, or nobody wants it.
        """
        timeout = start_timeout() if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if given_up is not None and given_up.is_set():
                raise ServerFailedError("the server was given up before it was ready")
            if READY in self.text() and self.healthy():
                return
            time.sleep(0.1)
        status = self.process.poll()
        what = (
            f"ended with status {status}"
            if status is not None
            else f"was not ready after {timeout:.0f} s ({START_VARIABLE})"
        )
        raise ServerFailedError(f"the server {what}; end of {self.log}:\n{self.text()[-4000:]}")

    def flush(self, timeout: float = 600.0) -> None:
        """Empty the prefix cache on device and host once no request runs; storage keeps what it has.

        Raises:
            TimeoutError: the server was not idle within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # SGLang answers with an error as long as requests run.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"{self.url}/flush_cache", data=b"", timeout=timeout).close()
                return
            time.sleep(0.1)
        raise TimeoutError(f"the cache cannot be flushed: requests still run after {timeout:.0f} s")

    def stop(self) -> None:
        """End the server and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_timeout() -> float:
    """Seconds that a server may take to start.

    Raises:
        ServerFailedError: the variable is no positive number.
    """
    text = os.environ.get(START_VARIABLE, "")
    try:
        seconds = float(text) if text else START_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ServerFailedError(f"{START_VARIABLE}={text} is no number of seconds")
    return seconds


def _die_with_parent() -> None:
    """Runs in the child: the kernel ends it when the process that started it dies, however that happens."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


_claims: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that nobody listens on, out of those that no outgoing connection takes before the server does.

    A server may listen minutes later only: until this process ends, no other call gets the port.

    Raises:
        OSError: none was found.
    """
    for _ in range(100):
        # Connections get ports from 32768 on. Not the shared generator: others may have seeded it alike.
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            _claim(port)
            return port
    raise OSError("no free TCP port between 10000 and 32767")


def _claim(port: int) -> None:
    """Keep other processes, too, from a port that is not listened on yet, by a name that the kernel frees at our end.

    Raises:
        OSError: somebody has claimed it.
    """
    if sys.platform != "linux":
        return
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0sglang-oscar port {port}")
    except OSError:
        claim.close()
        raise
    _claims.append(claim)


def launch_command(model: Path | str, port: int, args: Sequence[str] = ()) -> list[str]:
    """Command line of a server for ``model`` on 127.0.0.1, on the GPU where there is one."""
    device = "cuda" if has_gpu() else "cpu"
    base = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", device]
    # A scheduler that waits for requests keeps a core busy, which on a CPU others need: clients, other servers.
    waiting = ["--sleep-on-idle"] if device == "cpu" else []
    return [*base, "--host", "127.0.0.1", "--port", str(port), *waiting, *args]


@contextlib.contextmanager
def serve(
    model: Path | str,
    log: Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[LocalServer]:
    """Start a server, wait until it is ready, and stop it at the end of the ``with`` block.

    Args:
        model: model folder or id.
        log: file for its output.
        args: further command-line arguments.
        env: its environment; the process's own, made fit for this machine, by default.
        timeout, given_up: as of :meth:`LocalServer.wait_ready`.

    Raises:
        ServerFailedError: it did not become ready.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch_command(model, port, args),
            env=environment() if env is None else dict(env),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The child makes one system call before exec, which is safe beside threads.
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
    server = LocalServer(f"http://127.0.0.1:{port}", log, process)
    try:
        server.wait_ready(timeout, given_up)
        yield server
    finally:
        server.stop()
