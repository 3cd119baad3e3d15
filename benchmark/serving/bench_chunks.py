"""Long prompts in chunks: prompt tokens per second, by cache, size of a chunk, and whether results are waited for.

    python benchmark/serving/bench_chunks.py --shape qwen3-8b:9 --chunks 8192,2048

A chunk enters the prefix cache once its result is read, one step later, so that chunks follow each other on the GPU.
``int2_waiting`` is a server that waits for each result before it schedules the next chunk, as it does for hybrids and
sliding windows. Prompts are sent at once, each of its own tokens, and ask for one token; the fastest of the repeats
counts, of which each begins with an empty prefix cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from bench_throughput import ask
from machine import describe
from shapes import SHAPES
from subjects import MODES, Mode, subject

from oscar_cpu.server import environment
from oscar_tools.local_server import LocalServer, serve

WAITING = "int2_waiting"
_PLUGIN = """\
def register():
    from sglang_oscar.requests import nan
    nan.has_newest_only = lambda tree_cache: True
"""


def waiting(folder: Path) -> Mode:
    """Int2 mode that waits for chunks: a plugin of SGLang in a folder, which its servers find."""
    told = folder / "waits-1.0.dist-info"
    told.mkdir()
    (folder / "waits.py").write_text(_PLUGIN)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: waits\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[sglang.srt.plugins]\nwaits = waits:register\n")
    path = os.pathsep.join(filter(None, [str(folder), environment().get("PYTHONPATH")]))
    return MODES["int2"]._replace(env=MODES["int2"].env | {"PYTHONPATH": path})


def measure(server: LocalServer, prompts: int, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of each repeat, and prompt tokens per second of the fastest.

    Raises:
        RuntimeError: the server refused requests.
    """
    ask(server, [length], 1)  # kernels are compiled
    seconds = []
    for _ in range(repeats):
        server.flush()
        begin = time.perf_counter()
        ask(server, [length] * prompts, 1)
        seconds.append(round(time.perf_counter() - begin, 3))
    return {"seconds": seconds, "tokens_per_s": round(prompts * length / min(seconds), 1)}


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    prompts: Annotated[int, typer.Option(min=1, help="prompts at once")] = 8,
    length: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 100_000,
    chunks: Annotated[str, typer.Option(help="tokens of a chunk, with commas")] = "8192,2048",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, {WAITING}, with commas")] = f"int2,{WAITING}",
    repeats: Annotated[int, typer.Option(min=1, help="how often they are sent")] = 3,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/chunks.json"),
) -> None:
    """Measure prefill in chunks."""
    result: dict[str, Any] = describe() | {"shape": shape, "prompts": prompts, "length": length, "rows": []}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as plugin:
        what, known = subject(None, shape, Path(folder)), MODES | {WAITING: waiting(Path(plugin))}
        for chunk in chunks.split(","):
            for name in modes.split(","):
                args = [*what.flags, *known[name].args, "--chunked-prefill-size", chunk, *server_args.split()]
                log = out.with_suffix(f".{name}.{chunk}.log")
                with serve(what.folder, log, args, known[name].environment(what.folder)) as server:
                    facts = known[name].facts(server)
                    row = {"mode": name, "chunk": int(chunk)} | measure(server, prompts, length, repeats)
                print(row, flush=True)
                result["rows"].append(row | {"server": facts})
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
