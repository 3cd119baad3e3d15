"""A rank that the operating system kills while requests run: the server ends, and the next one takes over its folder.

Rows are lossless, and NaN where a window must be read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from support import ranks
from support.api import from_storage, loads, wait_for
from support.compare import LOGPROBS, assert_same
from support.reference import MODEL
from support.servers import HADAMARD, STRICT, TWO_CORES, TWO_RANKS, Server, serve
from support.speculation import with_plugins

pytestmark = ranks.MARKS
INT2 = [*ranks.INT2, "--max-running-requests", "4", "--enable-hierarchical-cache", "--hicache-ratio", "4"]
INT2 += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"]
LENGTH, PAGE, STORED = 900, 64, 640
"""Of a prompt, of a page, and what a hit on the prompt may have."""
TOKENS = 8
SECONDS = 120
"""In which all must have ended: SGLang's watchdog, which ends a server whose ranks wait for each other, takes 300."""
NEAR_TIE, DRIFT = 0.06, 0.1
"""Each rank rounds its half of every sum to BF16, and other prompts are asked in every run."""
OURS = re.compile("int2|oscar")
"""In the names of files."""


def prompt(number: int) -> list[int]:
    """As no other number begins."""
    return [number, *random.Random(number).choices(range(4096), k=LENGTH - 1)]


@contextmanager
def server_on(folder: Path, name: str) -> Iterator[Server]:
    """A server whose temporary files and pages are in ``folder``."""
    (temporary := folder / name).mkdir()
    env = {"TMPDIR": str(temporary), "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "store")}
    env = with_plugins(HADAMARD | STRICT | TWO_CORES | env, "lossless_plugin", "roomy_host_plugin")
    with serve(MODEL, folder / f"{name}.log", *INT2, *TWO_RANKS, env=env) as server:
        yield server


def processes(server: Server) -> list[psutil.Process]:
    """All of a server: of its session, also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # ended meanwhile
            if os.getsid(process.pid) == server.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def schedulers(server: Server) -> list[psutil.Process]:
    """The processes of the ranks: the last that the server has started; the detokenizer comes behind them."""
    started = psutil.Process(server.process.pid).children()
    return sorted(started, key=lambda process: process.create_time())[-3:-1]


def endless(server: Server, stream: bool) -> None:
    """A request that does not end for long."""
    sampling = {"temperature": 0, "max_new_tokens": 5000, "ignore_eos": True}
    body = {"input_ids": prompt(1000 + stream), "stream": stream, "sampling_params": sampling}
    with requests.post(f"{server.url}/generate", json=body, stream=stream, timeout=1500) as reply:
        reply.raise_for_status()
        for _ in reply.iter_lines():
            pass


def kill(server: Server, victims: Callable[[], list[psutil.Process]], busy: Callable[[], bool]) -> list[int]:
    """Kill processes of a server while requests run, and wait until all that belongs to it has ended.

    Args:
        server: of the processes.
        victims: which to kill.
        busy: whether now is the time.

    Returns:
        numbers of the prompts that were asked last: of one that was answered, and of those that were not.
    """
    asked, answered = itertools.count(1), [0]
    lost: list[int] = []

    def client() -> None:
        for number in asked:
            lost.append(number)
            server.generate(prompt(number), TOKENS)
            lost.remove(number)
            answered[0] = number

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(endless, server, stream) for stream in (False, True)]
        clients += [pool.submit(client) for _ in range(2)]
        try:
            wait_for(lambda: busy() and answered[0] and loads(server)[0] == 4, "requests of all clients run")
            for victim in victims():
                victim.send_signal(signal.SIGKILL)
            errors = [one.exception(SECONDS) for one in clients]
            server.process.wait(SECONDS)
            wait_for(lambda: not processes(server), "all processes have ended")
        finally:
            server.stop()  # or clients would keep the test from ending
    assert all(isinstance(error, requests.RequestException) for error in errors), errors
    for port in re.findall(r"(?:nccl_port=|port=)(\d+)", server.text()):
        socket.create_server(("127.0.0.1", int(port))).close()
    return [answered[0], *lost]


def test_a_rank_that_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Clients do not hang, nothing of the server is left, and the next one on its folder hits what both ranks have
    stored of a prompt."""
    folder = tmp_path_factory.mktemp("k")  # names of sockets in it must not be long
    store = folder / "store"

    def stored() -> int:
        return len(list(store.glob("*.bin")))

    with server_on(folder, "first") as server:
        victim = schedulers(server)[1]
        # With what moves its files, as where a container runs out of memory: a page may be half written.
        numbers = kill(server, lambda: [*victim.children(), victim], lambda: stored() > 200)

    with server_on(folder, "second") as server:
        hit = [server.generate(prompt(number), TOKENS, **LOGPROBS) for number in numbers]
        cold = [server.generate(prompt(number), TOKENS, extra_key="cold", **LOGPROBS) for number in numbers]
        before = stored()
        kill(server, lambda: schedulers(server)[:1], lambda: stored() > before + 200)
        assert "is damaged" not in server.text()
    hits = from_storage(hit)
    assert hits[0] == STORED, "of a prompt that was answered"
    assert all(tokens % PAGE == 0 and tokens <= STORED for tokens in hits)
    assert [answer["meta_info"]["cached_tokens"] for answer in cold] == [0] * len(cold)
    assert_same(cold, hit, NEAR_TIE, DRIFT)
    assert {path.suffix for path in store.iterdir()} == {".bin"}
    # SGLang leaves sockets, and libraries what they compiled.
    assert [path for name in ("first", "second") for path in (folder / name).rglob("*") if OURS.search(path.name)] == []
