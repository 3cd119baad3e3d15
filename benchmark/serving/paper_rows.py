"""What is measured of a load: tokens per second, or where a step of decoding goes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from decode_log import running_in, steady
from load_generator import generate
from paper_loads import COLD, HIT, Load
from room import Room
from step_profile import KINDS, RECORDED, NeverAtOnceError, profile_steps

from oscar_tools.local_server import LocalServer


def throughput_row(server: LocalServer, model: Path, load: Load, gpus: int) -> dict[str, Any]:
    """The load, tokens per second of a user (U) and of a GPU (G), and what came from the prefix cache.

    U is the inverse of the median time between tokens of a request; G is all generated tokens over the time from the
    first request to the last answer, and over the number of GPUs.

    Raises:
        RuntimeError: requests failed.
    """
    if load.cache == HIT:
        generate(server, model, load, 1, flush=True)
    before = len(server.text())
    found = generate(server, model, load, load.answer, flush=load.cache == COLD, warm_up=load.cache != HIT)
    log = server.text()[before:]
    cached = sum(int(n) for n in re.findall(r"#cached-token: (\d+)", log))
    running = max(running_in(log), default=0)
    return asdict(load) | {
        "U": round(1000 / found["median_tpot_ms"], 2) if found["median_tpot_ms"] else None,
        "G": round(found["output_throughput"] / gpus, 1),
        "first_token_ms": round(found["median_ttft_ms"], 1),
        "seconds": round(found["duration"], 2),
        "running": running,
        "cached_share": round(cached / (load.requests * load.prompt), 3),
    }


def step_row(server: LocalServer, model: Path, load: Load, room: Room, layers: int) -> dict[str, Any]:
    """The load, whether it fits the cache at once (``fits``), and if so milliseconds of a step.

    ``ms_per_step`` is what SGLang's log says, without a profiler; ``ms`` is by kind of kernel, with ``idle`` (no kernel
    runs) and ``total``, the sum of all, from a trace of the steps before. Prompts are computed first.

    Args:
        server: to ask; it logs as :data:`decode_log.FLAGS` say.
        model: folder with the tokenizer.
        load: the requests.
        room: of the server.
        layers: of the model, whose attention all is of one kind; 0 without a GPU: there is no trace, and no ``ms``.

    Raises:
        RuntimeError: requests failed, or were not decoded together all the time.
        ValueError: the answers are too short.
    """
    needed = room.needed(load.requests, load.prompt + load.answer)
    row = asdict(load) | {"fits": False, "needed": needed, "room": room.tokens, "room_requests": room.requests}
    if not room.holds(load.requests, load.prompt + load.answer):
        return row
    generate(server, model, load, 1, flush=True)
    before = len(server.text())
    asking = partial(generate, server, model, load, load.answer, flush=False, warm_up=False)
    trace: dict[str, Any] = {}
    try:
        if layers:
            trace = profile_steps(server, asking, layers, load.requests)
        else:
            asking()
    except NeverAtOnceError as error:
        return row | {"running": error.running}
    # Requests that all run after the recording ran together during it: none can come or go unseen in between.
    log = server.text()[before:]
    speed = steady(log[log.rindex(RECORDED) :] if layers else log)
    if speed.running < load.requests and not layers:
        return row | {"running": speed.running}
    if speed.running != load.requests or "Retract requests" in log:
        raise RuntimeError(f"{speed.running} of {load.requests} requests were left after the steps; see {server.log}")
    row |= {"fits": True, "running": speed.running, "ms_per_step": round(speed.ms_per_step, 3)}
    return row | (milliseconds(trace) if layers else {})


def milliseconds(trace: dict[str, Any]) -> dict[str, Any]:
    """Of :func:`step_profile.summarize`: milliseconds by kind, idle and in all, steps, and the longest kernels."""
    ms = {kind: trace["us_per_step"].get(kind, 0.0) / 1e3 for kind in (*KINDS, "other")}
    ms["idle"] = trace["idle_us_per_step"] / 1e3
    ms["total"] = sum(ms.values())
    return {
        "ms": {kind: round(took, 3) for kind, took in ms.items()},
        "steps": trace["steps"],
        "longest": trace["longest"],
    }


def layers_of(model: Path) -> int:
    """Layers of a model folder, all of which attend to everything.

    Raises:
        ValueError: some layers do not, so that launches of attention do not tell the number of steps.
    """
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    if others := set(config.get("layer_types") or []) - {"full_attention"}:
        raise ValueError(f"steps of a model with layers of {', '.join(sorted(others))} cannot be told apart by kernels")
    return int(config["num_hidden_layers"])
