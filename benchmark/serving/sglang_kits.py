"""SGLang's own test kits, unmodified, against a BF16 and an int2 server of one model: int2 passes what BF16 passes.

    python benchmark/serving/sglang_kits.py --model results/real_model      # scripts/real_model.py makes it
    python benchmark/serving/sglang_kits.py --only JSONConstrained --only MatchedStop

The kits come with SGLang (``sglang.test.kits``). They ask for the HTTP interface, constrained output, stops, aborts,
pauses, log probabilities, penalties and a tree of 400 shared beginnings. Kits that need a data set of the Hub, several
servers or a certain model are left out. A test that BF16 fails says something about the model, and is not held against
int2. Some tests are won or lost by rounding: a model that writes fields of JSON in either order, log probabilities of
tokens that it never says. ``--exact`` asks a third server, of int2 mode with rows of 16 bits: what that one loses, too,
is no matter of bits. Ends with status 1 if int2 fails a test that BF16 passes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shlex
import time
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from rich.console import Console
from rich.table import Table
from subjects import EXACT, Mode

from oscar_cpu.server import environment, has_gpu
from oscar_tools.local_server import LocalServer, serve

ROOT = Path(__file__).resolve().parents[2]
KITS = {
    "BasicAPIContractMixin": "basic_api_contract_kit",
    "BasicDecodeCorrectnessMixin": "basic_decode_correctness_kit",
    "BasicSchedulerStressMixin": "basic_scheduler_stress_kit",
    "JSONConstrainedMixin": "json_constrained_kit",
    "JSONModeMixin": "json_mode_kit",
    "RegexConstrainedMixin": "regex_constrained_kit",
    "EBNFConstrainedMixin": "ebnf_constrained_kit",
    "MatchedStopMixin": "matched_stop_kit",
    "AbortAllMixin": "abort_timeout_kit",
    "PauseResumeInPlaceMixin": "pause_generation_kit",
    "SpecLogprobKit": "spec_server_kits",
    "SpecPenaltyKit": "spec_server_kits",
    "SpecFeatureKit": "spec_server_kits",
}
"""Class of each kit, and its module in ``sglang.test.kits``. Those named after speculation ask nothing of it."""
FIXTURE = ("sglang.test.server_fixtures.eagle_fixture", "EagleServerBase")
"""Has the requests that some kits send; its server is not started."""
PASSED, FAILED, ABSENT = "passed", "failed", "absent"


@dataclass(frozen=True)
class Outcome:
    """One test against one server: what became of it, the last line of its error, and how long it took."""

    result: str
    error: str = ""
    seconds: float = 0.0


def run(test: unittest.TestCase) -> Outcome:
    """Run one test; what it prints is dropped. One that breaks has failed."""
    result, begin = unittest.TestResult(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        test.run(result)
    seconds = round(time.monotonic() - begin, 1)
    for _, trace in result.failures + result.errors:
        return Outcome(FAILED, trace.strip().splitlines()[-1][:300], seconds)
    for _, reason in result.skipped:
        return Outcome(ABSENT, reason, seconds)
    return Outcome(PASSED, seconds=seconds)


def tests_of(kit: str, server: LocalServer, model: str) -> type[unittest.TestCase] | None:
    """A class of a kit's tests that ask a running server; None where this SGLang has no such kit."""
    try:
        mixin = getattr(importlib.import_module(f"sglang.test.kits.{KITS[kit]}"), kit)
        requests_of = getattr(importlib.import_module(FIXTURE[0]), FIXTURE[1])
    except (ImportError, AttributeError):
        return None
    import openai

    facts = {
        "base_url": server.url,
        "process": server.process,
        "model": model,
        "served_model_name": model,
        "client": openai.Client(api_key="none", base_url=f"{server.url}/v1"),
    }
    return type(kit, (mixin, requests_of), facts)


def ask(server: LocalServer, model: str, kits: list[str]) -> dict[str, Outcome]:
    """Run kits against a server: outcomes by ``Kit.test``."""
    outcomes: dict[str, Outcome] = {}
    for kit in kits:
        tests = tests_of(kit, server, model)
        if tests is None:
            outcomes[kit] = Outcome(ABSENT, "not in this SGLang")
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(tests):
            # Alone, without what its class sets up: a server of the fixture's own.
            outcomes[f"{kit}.{name}"] = run(tests(name))
            resume(server)
        print(f"{kit}: the server {'is alive' if server.healthy() else 'is gone'}", flush=True)
    return outcomes


def resume(server: LocalServer) -> None:
    """Let a server go on: a test that fails while it is paused leaves it so, and all others would wait for it."""
    with contextlib.suppress(requests.RequestException):
        requests.post(f"{server.url}/continue_generation", json={}, timeout=60)


def lost(bf16: dict[str, Outcome], int2: dict[str, Outcome]) -> list[str]:
    """Tests that the first server passes and the second does not."""
    passed = [name for name, outcome in bf16.items() if outcome.result == PASSED]
    return [name for name in passed if int2.get(name, Outcome(ABSENT)).result != PASSED]


def show(outcomes: dict[str, dict[str, Outcome]]) -> None:
    """A table of all tests, a column for each server."""
    table = Table("test", *outcomes)
    for name in next(iter(outcomes.values())):
        found = [of[name] for of in outcomes.values() if name in of]
        table.add_row(name, *(f"{one.result}, {one.seconds:.1f} s" for one in found))
    Console(width=140).print(table)


def main(
    model: Annotated[Path, typer.Option(help="model folder")] = ROOT / "results" / "real_model",
    k_rotation: Annotated[str, typer.Option(help="rotation file, or hadamard")] = "hadamard",
    v_rotation: Annotated[str, typer.Option(help="rotation file, or hadamard")] = "hadamard",
    args: Annotated[str, typer.Option(help="further arguments of both servers")] = "",
    bf16_args: Annotated[str | None, typer.Option(help="arguments of the BF16 server alone")] = None,
    exact: Annotated[bool, typer.Option(help="ask int2 mode with rows of 16 bits, too")] = False,
    only: Annotated[list[str] | None, typer.Option(help="kits whose name contains this; repeatable")] = None,
    out: Annotated[Path, typer.Option(help="results")] = Path("sglang_kits.json"),
) -> None:
    """Compare the servers and write what every test said."""
    kits = [kit for kit in KITS if not only or any(word in kit for word in only)]
    if not kits:
        raise typer.BadParameter(f"no kit is named so; there are {', '.join(KITS)}", param_hint="--only")
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"no model in {model}; scripts/real_model.py makes one", param_hint="--model")
    if bf16_args is None:
        bf16_args = "" if has_gpu() else "--attention-backend torch_native"
    rotations = {"SGLANG_OSCAR_K_ROTATION_PATH": k_rotation, "SGLANG_OSCAR_V_ROTATION_PATH": v_rotation}
    int2 = ["--kv-cache-dtype", "int2"]
    own = {"BF16": Mode(shlex.split(bf16_args), {}), "exact": Mode(int2, EXACT), "int2": Mode(int2, rotations)}
    if not exact:
        del own["exact"]
    # Requests of the kits go to this machine, whatever proxy is set.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    outcomes: dict[str, dict[str, Outcome]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, mode in own.items():
        log = out.with_suffix(f".{name}.log")
        with serve(model, log, [*mode.args, *shlex.split(args)], environment() | mode.env) as server:
            facts[name] = mode.facts(server)
            outcomes[name] = ask(server, str(model), kits)
    show(outcomes)
    worse = lost(outcomes["BF16"], outcomes["int2"])
    results = {name: {test: asdict(one) for test, one in of.items()} for name, of in outcomes.items()}
    found = {**describe(), "servers": facts, "outcomes": results, "lost_with_int2": worse}
    if exact:
        found["lost_with_exact"] = lost(outcomes["BF16"], outcomes["exact"])
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"int2 fails {len(worse)} tests that BF16 passes" + "".join(f"\n  {name}" for name in worse))
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
