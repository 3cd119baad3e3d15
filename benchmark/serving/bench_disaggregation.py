"""Prefill and decode on servers of their own: bytes that are sent and time to the first token of the decode server.

    scripts/test_disaggregation.sh --collect-only    # installs Mooncake and nixl
    python benchmark/serving/bench_disaggregation.py --model models/reference --lengths 1024,2048,4096
    python benchmark/serving/bench_disaggregation.py --gpus 0,1 --transfers mooncake_tcp,nixl    # a GPU for each

Both servers run on this machine. Over TCP bytes can be read off the loopback interface: what is sent for a prompt is
what it received more than while nothing was asked. nixl takes shared memory and, between GPUs, NVLink, whose bytes no
interface counts; ``UCX_TLS=tcp,cuda_copy`` makes it take TCP. The time is that of a request for two tokens, of which
the prefill server computes the first and the decode server the second; the first is told as soon as the prompt has
arrived, which is a time of its own.

Further flags for both servers are those of ``--server-args``; a page size of 64 for all makes the sizes of what is sent
comparable. With ``--together`` all servers start at once and are asked one pair after the other: they need memory
beside each other, so ``--max-total-tokens`` has to be among the flags.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from shapes import SHAPES
from subjects import MODES, Mode, Subject, asking, subject

from oscar_tools.local_server import LocalServer, ServerFailedError, free_port, serve

TRANSFERS = ("mooncake_tcp", "nixl")
ON_THIS_MACHINE = {"MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1"}
LOOPBACK = "lo"
TOKENS = 2
"""One of each server."""
LONGEST_WAIT, LONGEST_QUIET = 600, 2.0
"""Seconds: for an answer, and to listen while nothing is asked."""


class Pair:
    """A prefill and a decode server, asked as a router asks them.

    Args:
        prefill, decode: the servers.
        port: where they meet.
    """

    def __init__(self, prefill: LocalServer, decode: LocalServer, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port
        self.rooms = itertools.count(1)

    def seconds(self, ids: list[int]) -> list[float]:
        """From sending a prompt to both until the decode server has told the prefill's token, and its own.

        Raises:
            requests.HTTPError: one of them refused.
            RuntimeError: the decode server told fewer tokens.
        """
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(self.rooms),
        }
        body = asking(ids, TOKENS) | meeting
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(post, self.prefill, body)
            told = [at - begin for at in arrivals(self.decode, body)]
            sent.result()
        return told


def post(server: LocalServer, body: dict[str, Any]) -> None:
    """Send a request and wait for the answer.

    Raises:
        requests.HTTPError: the server refused.
    """
    requests.post(f"{server.url}/generate", json=body, timeout=LONGEST_WAIT).raise_for_status()


def arrivals(server: LocalServer, body: dict[str, Any]) -> list[float]:
    """When each of ``TOKENS`` tokens had come, as :func:`time.perf_counter` has it.

    Raises:
        requests.HTTPError: the server refused.
        RuntimeError: the answer ended early.
    """
    found: list[float] = []
    address = f"{server.url}/generate"
    with requests.post(address, json=body | {"stream": True}, timeout=LONGEST_WAIT, stream=True) as reply:
        reply.raise_for_status()
        # Line by line as they come, not when a block is full.
        for line in reply.iter_lines(chunk_size=1):
            if not line.startswith(b"data: {"):
                continue
            answer = json.loads(line.removeprefix(b"data: "))
            if "meta_info" not in answer:
                raise RuntimeError(f"the decode server answered {answer}")
            # Tokens that came together share the time.
            found += [time.perf_counter()] * (answer["meta_info"]["completion_tokens"] - len(found))
    if len(found) != TOKENS:
        raise RuntimeError(f"the decode server told {len(found)} tokens of {TOKENS}")
    return found


@contextlib.contextmanager
def pair(mode: Mode, what: Subject, transfer: str, gpus: list[str], flags: list[str], log: Path) -> Iterator[Pair]:
    """Start both servers of a cache beside each other; their logs go beside ``log``.

    Args:
        mode: the cache.
        what: the model.
        transfer: of ``TRANSFERS``.
        gpus: of the prefill and of the decode server; none where there are none.
        flags: further ones of both.
        log: as said.
    """
    port = free_port()
    ends = {"prefill": ["--disaggregation-bootstrap-port", str(port)], "decode": []}
    for own, gpu in zip(ends.values(), gpus, strict=False):
        own += ["--base-gpu-id", gpu]
    env = mode.environment(what.folder) | ON_THIS_MACHINE
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        started = []
        for end, own in ends.items():
            args = [*what.flags, "--disaggregation-mode", end, "--disaggregation-transfer-backend", transfer]
            args += [*own, *mode.args, *flags]
            server = serve(what.folder, log.with_suffix(f".{end}.log"), args, env)
            started.append(pool.submit(stack.enter_context, server))
        prefill, decode = (server.result() for server in started)
        yield Pair(prefill, decode, port)


def received() -> int:
    """Bytes that the loopback interface has received since it is up.

    Raises:
        FileNotFoundError: there is no such interface.
    """
    return int(Path(f"/sys/class/net/{LOOPBACK}/statistics/rx_bytes").read_text())


def measure(servers: Pair, what: Subject, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for every length: bytes sent, and milliseconds, medians over ``repeats`` prompts."""
    rows = []
    for length in lengths:
        # Kernels are compiled, and the servers get to know each other.
        servers.seconds(what.prompt(length, length))
        told, sent = [], []
        for number in range(repeats):
            ids = what.prompt(1 + number + length, length)
            before, begin = received(), time.perf_counter()
            told.append(servers.seconds(ids))
            between, after = received(), time.perf_counter()
            time.sleep(min(after - begin, LONGEST_QUIET))
            # Servers talk to each other all the time.
            quiet = (received() - between) * (after - begin) / (time.perf_counter() - after)
            sent.append(between - before - quiet)
        arrived, decoded = (1e3 * statistics.median(times) for times in zip(*told, strict=True))
        rows.append({
            "length": length,
            "bytes": int(statistics.median(sent)),
            "bytes_per_token": round(statistics.median(sent) / length, 1),
            "ms_arrived": round(arrived, 1),
            "ms": round(decoded, 1),
            "all_ms": [round(1e3 * times[-1], 1) for times in told],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


Start = Callable[[], contextlib.AbstractContextManager[Pair]]


@contextlib.contextmanager
def started(starts: dict[tuple[str, str], Start], together: bool) -> Iterator[dict[tuple[str, str], Start]]:
    """What enters each pair: those that run already, or those that start then.

    Args:
        starts: what starts a pair.
        together: whether all start now.
    """
    if not together:
        yield starts
        return
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(starts)) as pool:
        running = {name: pool.submit(stack.enter_context, start()) for name, start in starts.items()}

        @contextlib.contextmanager
        def wait(name: tuple[str, str]) -> Iterator[Pair]:
            # No pair is asked while another starts.
            futures.wait(running.values())
            yield running[name].result()

        yield {name: partial(wait, name) for name in starts}


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    lengths: Annotated[str, typer.Option(help="tokens of a prompt, with commas")] = "2048,8192,32768",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2",
    transfers: Annotated[str, typer.Option(help=f"of {', '.join(TRANSFERS)}, with commas")] = TRANSFERS[0],
    gpus: Annotated[str, typer.Option(help="of the prefill and the decode server, as PREFILL,DECODE")] = "",
    repeats: Annotated[int, typer.Option(help="prompts of every length", min=1)] = 5,
    together: Annotated[bool, typer.Option(help="start all servers at once")] = False,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "--page-size 64",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/disaggregation.json"),
) -> None:
    """Measure what is sent from prefill to decode. A pair that fails is noted, and the others go on."""
    result: dict[str, Any] = describe()
    out.parent.mkdir(parents=True, exist_ok=True)
    sizes, places = [int(part) for part in lengths.split(",")], list(filter(None, gpus.split(",")))
    flags = server_args.split()
    with tempfile.TemporaryDirectory() as folder:
        what = subject(model, shape, Path(folder))
        result["shape"] = what.name
        names = list(itertools.product(transfers.split(","), modes.split(",")))
        starts: dict[tuple[str, str], Start] = {
            (transfer, mode): partial(
                pair, MODES[mode], what, transfer, places, flags, out.with_suffix(f".{transfer}.{mode}.log")
            )
            for transfer, mode in names
        }
        with started(starts, together) as pairs:
            for transfer, mode in names:
                print(transfer, mode, flush=True)
                try:
                    with pairs[transfer, mode]() as servers:
                        ends = {"prefill": servers.prefill, "decode": servers.decode}
                        said = {end: MODES[mode].facts(server) for end, server in ends.items()}
                        result.setdefault("servers", {}).setdefault(transfer, {})[mode] = said
                        found: Any = measure(servers, what, sizes, repeats)
                except (ServerFailedError, requests.RequestException, RuntimeError) as error:
                    found = f"failed: {error}"
                    print(found, flush=True)
                result.setdefault(transfer, {})[mode] = found
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
