"""A prefill and a decode server that exchange caches through Mooncake over TCP or nixl, asked as a router asks them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oscar_tools.local_server import free_port
from support.servers import Server, serve

BACKENDS = {"mooncake_tcp": "mooncake", "nixl": "nixl"}
"""What transfers, and the package that it needs."""
MISSING = {name: package for name, package in BACKENDS.items() if importlib.util.find_spec(package) is None}
ENVIRONMENT = {"MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"}


def over(backend: str) -> tuple[str, str]:
    """Arguments of a server that transfers by a backend."""
    return "--disaggregation-transfer-backend", backend


def needs(backend: str) -> pytest.MarkDecorator:
    """Skips a test where the package of a backend is missing."""
    why = f"needs {BACKENDS[backend]}; scripts/test_disaggregation.sh installs it"
    return pytest.mark.skipif(backend in MISSING, reason=why)


def backend_params() -> list[Any]:
    """A parameter for each backend, skipped where its package is missing."""
    return [pytest.param(name, marks=needs(name)) for name in BACKENDS]


@dataclass
class Pair:
    """A prefill and a decode server, which is asked ``ahead`` seconds behind it."""

    prefill: Server
    decode: Server
    port: int
    ahead: float = 0.0
    _rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def generate(self, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        """As :meth:`support.servers.Server.generate`: the decode server's answer, with the prefill's cached tokens."""
        meeting = self._meeting()
        with ThreadPoolExecutor(2) as pool:
            sent = pool.submit(self.prefill.generate, ids, tokens, **extra, **meeting)
            time.sleep(self.ahead)
            answer = pool.submit(self.decode.generate, ids, tokens, **extra, **meeting)
            cached = sent.result()["meta_info"]["cached_tokens"]
            result = answer.result()
            result["meta_info"]["cached_tokens"] = cached
            return result

    def ask_decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Ask the decode server alone."""
        return self.decode.generate(ids, tokens, **self._meeting())

    def _meeting(self) -> dict[str, Any]:
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(self._rooms)}


@contextlib.contextmanager
def serve_pair(
    model: Path,
    folder: Path,
    *args: str,
    backend: str,
    env: dict[str, str],
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    of_decode: dict[str, str] | None = None,
) -> Iterator[Pair]:
    """Start both at once.

    Args:
        model: what both serve.
        folder: for their logs.
        args: of both.
        backend: what transfers, of ``BACKENDS``.
        env: of both.
        prefill, decode: further arguments of one server.
        of_decode: further variables of the decode server.
    """
    port, common = free_port(), (*over(backend), *args)
    bootstrap = ("--disaggregation-bootstrap-port", str(port))
    first = ("--disaggregation-mode", "prefill", *bootstrap, *common, *prefill)
    second = ("--disaggregation-mode", "decode", *common, *decode)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(
                stack.enter_context, serve(model, folder / log, *arguments, env=env | ENVIRONMENT | own, warm_up=True)
            )
            for log, arguments, own in (("prefill.log", first, {}), ("decode.log", second, of_decode or {}))
        ]
        yield Pair(*(server.result() for server in started), port)
