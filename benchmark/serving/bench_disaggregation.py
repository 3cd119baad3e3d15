"""Prefill and decode on servers of their own: bytes that are sent and time to the first token of the decode server.

    scripts/test_disaggregation.sh --collect-only    # installs Mooncake
    python benchmark/serving/bench_disaggregation.py --model models/reference --lengths 1024,2048,4096

Both servers run on this machine and exchange caches through Mooncake over TCP, so that bytes can be read off the
loopback interface: what is sent for a prompt is what it received more than while nothing was asked. The time is that of
a request for two tokens, of which the prefill server computes the first and the decode server the second.

Further flags for both servers are those of ``--server-args``; a page size of 64 for all makes the sizes of what is sent
comparable.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from shapes import SHAPES
from subjects import MODES, Mode, Subject, asking, subject

from sglang_oscar.cpu.server import environment
from sglang_oscar.local_server import LocalServer, free_port, serve

TRANSFER = ["--disaggregation-transfer-backend", "mooncake_tcp"]
OVER_TCP = {"MC_FORCE_TCP": "1"}
TOKENS = 2
"""One of each server."""


class Pair:
    """A prefill and a decode server, asked as a router asks them.

    Args:
        prefill, decode: the servers.
        port: where they meet.
    """

    def __init__(self, prefill: LocalServer, decode: LocalServer, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.rooms = itertools.count(1)

    def seconds(self, ids: list[int]) -> float:
        """From sending a prompt to both until the decode server has answered.

        Raises:
            requests.HTTPError: one of them refused.
        """
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(self.rooms),
        }
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(post, self.prefill, asking(ids, TOKENS) | meeting)
            post(self.decode, asking(ids, TOKENS) | meeting)
            took = time.perf_counter() - begin
            sent.result()
        return took


def post(server: LocalServer, body: dict[str, Any]) -> None:
    """Send a request and wait for the answer.

    Raises:
        requests.HTTPError: the server refused.
    """
    requests.post(f"{server.url}/generate", json=body, timeout=3600).raise_for_status()


@contextlib.contextmanager
def pair(mode: Mode, what: Subject, flags: list[str], log: Path) -> Iterator[Pair]:
    """Start both servers of a cache beside each other; their logs go beside ``log``."""
    port = free_port()
    ends = {"prefill": ["--disaggregation-bootstrap-port", str(port)], "decode": []}
    env = environment() | mode.env | OVER_TCP
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = []
        for end, own in ends.items():
            args = [*what.flags, "--disaggregation-mode", end, *own, *TRANSFER, *mode.args, *flags]
            server = serve(what.folder, log.with_suffix(f".{end}.log"), args, env)
            started.append(pool.submit(stack.enter_context, server))
        prefill, decode = (server.result() for server in started)
        yield Pair(prefill, decode, port)


def received(interface: str) -> int:
    """Bytes that a network interface has received since it is up.

    Raises:
        FileNotFoundError: there is no such interface.
    """
    return int(Path(f"/sys/class/net/{interface}/statistics/rx_bytes").read_text())


def measure(servers: Pair, what: Subject, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for every length: bytes sent, and milliseconds, medians over ``repeats`` prompts."""
    rows = []
    # Kernels are compiled, and the servers get to know each other.
    servers.seconds(what.prompt(0, lengths[0]))
    for length in lengths:
        took, sent = [], []
        for number in range(repeats):
            ids = what.prompt(1 + number + length, length)
            before, begin = received("lo"), time.perf_counter()
            took.append(servers.seconds(ids))
            between, after = received("lo"), time.perf_counter()
            time.sleep(after - begin)
            # Servers talk to each other all the time.
            sent.append(between - before - (received("lo") - between))
        rows.append({
            "length": length,
            "bytes": int(statistics.median(sent)),
            "bytes_per_token": round(statistics.median(sent) / length, 1),
            "ms": round(1e3 * statistics.median(took), 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    lengths: Annotated[str, typer.Option(help="tokens of a prompt, with commas")] = "2048,8192,32768",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2",
    repeats: Annotated[int, typer.Option(help="prompts of every length", min=1)] = 5,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "--page-size 64",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/disaggregation.json"),
) -> None:
    """Measure what is sent from prefill to decode."""
    result: dict[str, Any] = describe()
    out.parent.mkdir(parents=True, exist_ok=True)
    sizes = [int(part) for part in lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        what = subject(model, shape, Path(folder))
        result["shape"] = what.name
        for name in modes.split(","):
            print(name, flush=True)
            with pair(MODES[name], what, server_args.split(), out.with_suffix(f".{name}.log")) as servers:
                result[name] = measure(servers, what, sizes, repeats)
            out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
