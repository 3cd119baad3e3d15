"""``oscar doctor``: can this machine, and this model on it, run int2 mode; if not, why, and what to change."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer

from oscar_rotation.recipe_options import model_overrides
from oscar_tools.doctor.machine import machine_checks, memory_bytes
from oscar_tools.doctor.model import Ranks, model_checks


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or id; without it only the machine is checked.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--kv-cache-quant-group-size", help="Group size to check the model with.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="GPUs that share the model (tensor parallelism).")] = 1,
    dp: Annotated[
        int, typer.Option("--dp", min=1, help="Replicas of attention among them (--dp-size, --enable-dp-attention).")
    ] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(min=1, help="GiB of a GPU, to size another machine; default: this one's.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--speculative-draft-model-path", help="Draft model to check with it; MODEL itself if it drafts."),
    ] = None,
    host_size: Annotated[
        int, typer.Option("--hicache-size", min=0, help="Host memory of a hierarchical cache, 10^9 bytes a rank.")
    ] = 0,
    host_ratio: Annotated[
        float, typer.Option("--hicache-ratio", min=0, help="The same as a multiple of the tokens on the device.")
    ] = 0,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request at most, as for the server; default: the model's.")
    ] = None,
    overrides: Annotated[
        str, typer.Option("--json-model-override-args", metavar="JSON", help="Of the model's configuration, likewise.")
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether this machine, and MODEL on it, can run int2 mode and, if not, why."""
    model_overrides(overrides)
    if not math.isfinite(host_ratio):
        raise typer.BadParameter(f"{host_ratio} is no number of times", param_hint="--hicache-ratio")
    of_model = {
        "--kv-cache-quant-group-size": group_size, "--speculative-draft-model-path": draft,
        "--hicache-size": host_size, "--hicache-ratio": host_ratio, "--context-length": context_length,
        "--json-model-override-args": overrides != "{}", "--tp": tp > 1, "--dp": dp > 1,
        "--gpu-memory": gpu_memory,
    }  # fmt: skip
    for flag, value in of_model.items():
        if value and model is None:
            raise typer.BadParameter("has no meaning without a MODEL", param_hint=flag)
    checks = machine_checks()
    if model is not None and all(check.ok for check in checks[:1]):
        config = {"context_length": context_length, "model_override_args": overrides}
        memory = memory_bytes() if gpu_memory is None else int(gpu_memory * 2**30)
        found = model_checks(model, group_size, memory, draft, host_size, host_ratio, config, Ranks(tp, dp))
        checks = [*checks, *found]
    ok = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            typer.echo(check.line())
    raise typer.Exit(0 if ok else 1)
