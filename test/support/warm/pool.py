"""Warm processes of a test run's worker: one for every environment that has servers.

Those with SGLang are forked from others, which have the libraries that it imports.
"""

from __future__ import annotations

import atexit
import marshal
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

from support.warm import channel, preload
from support.warm.client import Client, install, log
from support.warm.launch import Launch
from support.warm.rule import BOOT, IMPORTS, LIBRARIES, READ, Warm, boots, counted, misfits, replacing

MOST = 4
"""Warm processes with SGLang that a worker of a test run keeps."""
SWITCH = "OSCAR_TEST_WARM"
"""Environment variable: 0 starts every process anew."""
TESTS = Path(__file__).parents[2]


class Started(Client):
    """A warm process that was started by this one, with its log; ``asked`` counts what was forked from it."""

    asked = 0

    def __init__(self, environment: dict[str, str]) -> None:
        link, other = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT.format(tests=str(TESTS), number=other.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=[other.fileno()],
            )
        self.link = link
        hello = channel.receive(link)
        if hello is None:
            raise RuntimeError(self.fault())
        super().__init__(link, Warm(**marshal.loads(hello[0])))

    def fault(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        return f"{super().fault()}; status {status}: {self._log.read()[-4000:].decode(errors='replace')}"

    def close(self) -> None:
        """End it; what was forked from it goes on."""
        self._process.kill()  # closing the channel is not enough where a fork of this process has it, too
        self._process.wait()
        self.link.close()


class Pool:
    """All warm processes of this process."""

    def __init__(self) -> None:
        self._bases: list[Started] = []
        self._started: list[Started] = []
        self._starting = threading.RLock()  # whoever starts a warm process asks for one to fork it from
        self._owner = os.getpid()

    def find(self, launch: Launch) -> Client | None:
        """The warm process whose environment fits; None where there is none and it would not be worth its start."""
        if os.getpid() != self._owner:
            return None
        with self._starting:
            if boots(launch):
                return self._base(launch)
            fitting = next((client for client in self._started if fits(launch, client.warm)), None)
            if fitting is None and starts_workers(launch):
                log("a warm process more", "; ".join(str(misfits(launch, one.warm)) for one in self._started).encode())
                fitting = Started(environment_for(launch))
                self._started.append(fitting)
            if fitting is not None:
                fitting.asked += 1
            if len(self._started) > MOST:
                # A release that has one server is not asked again; the installed one is, in most files.
                least = min((client for client in self._started if client is not fitting), key=lambda one: one.asked)
                self._started.remove(least)
                least.close()
            return fitting

    def _base(self, launch: Launch) -> Client | None:
        """The warm process without SGLang from which one with it is forked; None for one that is to be without."""
        if preload.SERVER not in launch.environment:
            return None
        fitting = next((client for client in self._bases if misfits(launch, client.warm) is None), None)
        if fitting is None:
            fitting = Started(base_for(launch))
            self._bases.append(fitting)
        return fitting

    def close(self) -> None:
        """End all of them."""
        if os.getpid() == self._owner:
            for client in self._started + self._bases:
                client.close()


def starts_workers(launch: Launch) -> bool:
    """Whether a launch is worth a warm process: of a server or a command with servers, whose workers are forked, too.

    Others are forked from a warm process that is there.
    """
    return preload.SERVER in launch.environment or not {"sglang_oscar", "oscar_tools"}.isdisjoint(launch.command)


def fits(launch: Launch, warm: Warm) -> bool:
    """Whether a launch can be forked from a warm process, and for a server's that has SGLang."""
    return misfits(launch, warm) is None and ("sglang" in warm.modules or preload.SERVER not in launch.environment)


def environment_for(launch: Launch, modules: Iterable[str] = IMPORTS) -> dict[str, str]:
    """The environment of a warm process that a launch fits; ``modules`` are those that it imports."""
    read = [name for name in launch.environment if name.startswith(READ)]
    folders = os.pathsep.join(replacing(launch.environment, launch.cwd, modules))
    return counted(launch.environment, read) | ({"PYTHONPATH": folders} if folders else {})


def base_for(launch: Launch) -> dict[str, str]:
    """The environment of a warm process without SGLang that a launch fits."""
    environment = environment_for(launch, LIBRARIES)
    return {name: value for name, value in environment.items() if name != preload.SERVER}


def wanted() -> bool:
    """Whether processes of tests are to be forked. With a GPU they are not: its driver must not see forks."""
    import torch

    return os.environ.get(SWITCH) != "0" and sys.platform == "linux" and not torch.cuda.is_available()


def enable() -> None:
    """From now on fork what this process starts, as far as ``rule`` lets it."""
    pool = Pool()
    atexit.register(pool.close)
    install(pool.find)
