"""Time to the first token by where the beginning of a prompt is: nowhere, on the device, on the host, in storage.

For every cache, one server with the same bytes of host memory and an empty folder of storage. Every length is asked
with a prompt of its own: computed, hit on the device, hit on the host once other prompts have pushed it off the device,
and hit in storage once the server has forgotten device and host. SGLang says of every request where its cached tokens
came from; both are recorded, what it says and what was meant. ``written`` is how many bytes the prompt has in storage,
and how long after its answer the last of them was there. With storage a hit on the device is asked for twice, while the
prompt's pages are written, and at rest; every other hit is at rest.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from room import room_of
from shapes import SHAPES
from subjects import MODES, asking, subject

from oscar_tools.local_server import LocalServer, serve

TIERS = ("device", "host", "storage")
LONGEST_WAIT = 3600
QUIET = 2.0
"""Seconds without a new page after which no more are expected."""


def first_token(server: LocalServer, ids: list[int]) -> dict[str, Any]:
    """Milliseconds to the first token of a prompt, and how many of its tokens came from which tier."""
    begin = time.perf_counter()
    reply = requests.post(f"{server.url}/generate", json=asking(ids, 1), timeout=LONGEST_WAIT)
    took = time.perf_counter() - begin
    reply.raise_for_status()
    details = reply.json()["meta_info"].get("cached_tokens_details") or {}
    return {"ms": round(1000 * took, 2)} | {tier: details.get(tier) or 0 for tier in TIERS}


def measure(
    server: LocalServer, lengths: list[int], vocabulary: int, repeats: int, others: int, folder: Path | None
) -> list[dict[str, Any]]:
    """Rows of length, what was meant, milliseconds and cached tokens by tier.

    Args:
        server: with all tiers.
        lengths: tokens of a prompt.
        vocabulary: ids that prompts are made of.
        repeats: prompts of every length.
        others: tokens that push everything else off the device.
        folder: of storage, if there is one.
    """
    rng, rows = random.Random(0), []
    page_size = room_of(server).page

    def fresh(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    known = fresh(lengths[0])
    for _ in range(2):  # kernels are compiled, those of a hit too
        hit = first_token(server, known)
    if folder:  # or its pages would count as those of the next prompt
        delete(settle(folder, hit["device"] // page_size)[0])
    for length in lengths * repeats:
        ids = fresh(length)
        found = {"computed": first_token(server, ids)}
        answered = time.perf_counter()
        found["device, while it is written" if folder else "device"] = hit = first_token(server, ids)
        if folder:
            own, came = settle(folder, hit["device"] // page_size)
            found["device"] = first_token(server, ids)
            written = {"bytes": sum(file.stat().st_size for file in own), "seconds": round(came - answered, 2)}
        for _ in range(-(-others // length)):
            first_token(server, fresh(length))
        if folder:
            # BF16 pages of all that was asked would fill a disk.
            delete(settle(folder, len(own))[0] - own)
        found["host"] = first_token(server, ids)
        if folder:
            server.flush(LONGEST_WAIT)
            found["storage"] = first_token(server, ids) | {"written": written}
            delete(own)
        rows += [{"length": length, "meant": meant} | row for meant, row in found.items()]
        for row in rows[-len(found) :]:
            print(row, flush=True)
    return rows


def settle(folder: Path, least: int) -> tuple[set[Path], float]:
    """Wait until a folder of storage has its pages and no more come.

    A long prompt's are written for seconds after its answer, with breaks: it says itself how many there must be.

    Returns:
        the files, and when the last one was seen to be there (``time.perf_counter()``).

    Raises:
        TimeoutError: they do not come.
    """
    begin = came = time.perf_counter()
    seen: set[Path] = set()
    while len(seen) < least or time.perf_counter() - came < QUIET:
        if time.perf_counter() - begin > LONGEST_WAIT:
            raise TimeoutError(f"{folder} has {len(seen)} pages of {least} after {LONGEST_WAIT} s")
        time.sleep(0.1)
        if (now := set(folder.glob("*.bin"))) != seen:
            seen, came = now, time.perf_counter()
    return seen, came


def delete(files: Iterable[Path]) -> None:
    """Remove pages, which makes them misses."""
    for file in files:
        file.unlink(missing_ok=True)


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    lengths: Annotated[str, typer.Option(help="tokens of a prompt, with commas")] = "2048,8192,32768",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2",
    host_gigabytes: Annotated[int, typer.Option(help="host memory of every server, 10^9 bytes")] = 40,
    device_tokens: Annotated[int, typer.Option(help="tokens of the history pool")] = 131_072,
    repeats: Annotated[int, typer.Option(help="prompts of every length")] = 3,
    storage: Annotated[bool, typer.Option(help="measure hits in storage, too")] = True,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/host_tier.json"),
) -> None:
    """Measure what a hit in every tier saves."""
    result: dict[str, Any] = describe() | {"shape": model.name if model else shape, "host_gigabytes": host_gigabytes}
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = [int(part) for part in lengths.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        what = subject(model, shape, place)
        flags = [*what.flags, "--max-total-tokens", str(device_tokens), "--enable-hierarchical-cache"]
        flags += ["--hicache-size", str(host_gigabytes)]
        if storage:
            flags += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"]
        flags += server_args.split()
        for name in modes.split(","):
            store = place / name
            store.mkdir()
            env = MODES[name].environment(what.folder) | {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
            with serve(what.folder, out.with_suffix(f".{name}.log"), [*flags, *MODES[name].args], env) as server:
                result.setdefault("servers", {})[name] = MODES[name].facts(server)
                result[name] = measure(
                    server, asked, what.vocabulary, repeats, device_tokens, store if storage else None
                )
            out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
