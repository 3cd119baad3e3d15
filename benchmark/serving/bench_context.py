"""Very long requests, by cache: tokens per second behind 128K and 262K tokens, and how many tokens a card holds.

    python benchmark/serving/bench_context.py --shape qwen3.6-35b-a3b:20 --loads 4x131072,1x261888
    python benchmark/serving/bench_context.py --shape qwen3.6-35b-a3b --room       # tokens that fit, without prompts

Weights are random; ``NAME:LAYERS`` is a model with fewer layers. With few of them a step waits for the host, whatever
the cache: ``--steps`` shows it. Prompts are sent once before they are measured, so that they come from the prefix
cache. Runs with one ``--lock FILE`` share a GPU, see ``one_gpu.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import describe
from one_gpu import Questions, measure, parse_loads
from room import room_of
from shapes import SHAPES, attending_layers
from subjects import MODES, Mode, Subject, subject

from oscar_tools.local_server import serve


def room(mode: Mode, what: Subject, flags: list[str], log: Path) -> dict[str, Any]:
    """Tokens that a cache holds and requests that run at once, and what its server says, which has just started."""
    with serve(what.folder, log, [*what.flags, *mode.args, *flags], mode.environment(what.folder)) as server:
        found, facts = room_of(server), mode.facts(server)
    return {"tokens": found.tokens, "requests": found.requests, "server": facts}


def main(
    shape: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}; or NAME:LAYERS")] = "qwen3-8b",
    loads: Annotated[str, typer.Option(help="requests x tokens of a prompt, with commas")] = "4x131072,1x261888",
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,fp8,int2",
    tokens: Annotated[int, typer.Option(help="tokens that a request generates")] = 256,
    steps: Annotated[bool, typer.Option(help="profile where a step goes")] = False,
    only_room: Annotated[bool, typer.Option("--room", help="only how many tokens fit")] = False,
    lock: Annotated[Path | None, typer.Option(help="file that is locked while speed is measured")] = None,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/context.json"),
) -> None:
    """Measure requests behind long contexts."""
    result: dict[str, Any] = describe() | {"shape": shape}
    out.parent.mkdir(parents=True, exist_ok=True)
    flags, questions = server_args.split(), Questions(parse_loads(loads), tokens, lock)
    with tempfile.TemporaryDirectory() as folder:
        what = subject(None, shape, Path(folder))
        for name in modes.split(","):
            mode, log = MODES[name], out.with_suffix(f".{name}.log")
            if only_room:
                result[name] = room(mode, what, flags, log)
                print(name, result[name], flush=True)
            else:
                # Stock kernels are the same for layers with a window, so they are launched for those, too.
                layers = attending_layers(shape, windows=mode.stock) if steps else 0
                result[name] = measure(mode, what, flags, {}, log, questions, layers)
            out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
