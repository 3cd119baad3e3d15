"""Every configuration that int2 mode cannot run ends before a model is loaded, with one line that says what to change.

Most cases go through the command line's own code in one shared process, up to where a model would be loaded; one of
each class is launched for real.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_oscar.attach.refusals import ARGUMENTS, MODELS
from sglang_oscar.errors import EXIT_CODE
from support.launch_cases import run_cases
from support.refusal_cases import FIELDS, MODEL_CASES, REFUSED, Refused, V, write_files
from support.servers import HADAMARD, LAUNCH_TIMEOUT, server_environment

pytestmark = pytest.mark.server

PREFIX = "sglang-oscar: error: "
INT2 = ["--device", "cpu", "--kv-cache-dtype", "int2", "--skip-tokenizer-init"]


ACCEPTED = [
    "",
    "--attention-backend fa3 --kv-cache-quant-group-size 32",
    "--page-size 128",
    "--elastic-ep-backend none",
    "--enable-dp-attention --dp-size 2 --tp-size 2",
    "--pp-size 2",
    "--load-format presharded",
    "--load-format dummy --checkpoint-engine-wait-weights-before-ready",
    "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj v_proj --lora-backend torch_native",
    "--enable-hierarchical-cache",
    "--enable-hierarchical-cache --hicache-storage-backend file --hicache-mem-layout layer_first",
    "--speculative-algorithm NGRAM",
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 64 --speculative-ngram-max-bfs-breadth 1",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(qwen3: Path, files: Path) -> dict[str | tuple[str, str], Any]:
    """What happens to every case: key -> result of ``support.launch_cases``."""

    def case(refused: Refused) -> dict[str, Any]:
        model = str(qwen3) if refused.model is None else refused.model.format(files=files)
        env = {name: value.format(files=files) for name, value in refused.env.items()}
        return {"argv": ["--model-path", model, *INT2, *refused.argv], "env": env, "unset": list(refused.unset)}

    cases: dict[Any, dict[str, Any]] = {name: case(refused) for name, refused in REFUSED.items()}
    base = ["--model-path", str(qwen3), *INT2]
    cases |= {("accepted", flags): {"argv": [*base, *flags.split()]} for flags in ACCEPTED}
    cases["accepted", "plan stream"] = {"argv": base, "env": {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}}
    plain = ["--model-path", str(qwen3), "--device", "cpu", "--skip-tokenizer-init"]
    cases["group without int2"] = {"argv": [*plain, "--kv-cache-quant-group-size", "64"]}
    results = run_cases(list(cases.values()), server_environment(HADAMARD))
    return dict(zip(cases, results, strict=True))


def refusal(outcome: dict[str, Any]) -> str:
    """The one line of a refusal."""
    lines = outcome["error"].strip().splitlines()
    assert outcome["status"] == EXIT_CODE, outcome["error"]
    assert lines[-1].startswith(PREFIX)
    assert "Traceback" not in outcome["error"]
    assert sum(line.startswith(PREFIX) for line in lines) == 1
    return lines[-1].removeprefix(PREFIX)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, files: Path, outcomes: dict) -> None:
    """With one line that names what was given and says what the table says."""
    line = refusal(outcomes[name])
    assert REFUSED[name].said(line, files), line


def test_every_refused_argument_is_among_the_flags(outcomes: dict) -> None:
    """No row of the table is dead: each refuses at least one of the command lines above."""
    lines = [refusal(outcomes[name]) for name in REFUSED]
    for _, what in ARGUMENTS:
        named = {word.lstrip("-").replace("-", "_") for word in what.split() if word.startswith("--")}
        assert any(line.endswith(what) for line in lines) or not named & FIELDS.keys(), what


def test_model_table_is_covered() -> None:
    """Rows that no case above reaches are named here, so that a new row asks for a case."""
    texts = [what for _, what in MODELS if not any(mark in what for _, _, mark in MODEL_CASES.values())]
    assert texts == ["block-sparse attention models", "encoder-decoder models"]


def test_group_size_needs_int2(outcomes: dict) -> None:
    line = refusal(outcomes["group without int2"])
    assert "--kv-cache-quant-group-size" in line
    assert "--kv-cache-dtype int2" in line


def test_accepted(outcomes: dict) -> None:
    """What is fine is accepted, and other attention backends are replaced with a warning."""
    accepted = {key[1]: outcome for key, outcome in outcomes.items() if key[0] == "accepted"}
    for flags, outcome in accepted.items():
        assert outcome["status"] == 0, outcome["error"]
        assert outcome["values"]["attention_backend"] == "oscar"
        assert outcome["values"]["page_size"] == (128 if "128" in flags else 64)
    replaced = accepted["--attention-backend fa3 --kv-cache-quant-group-size 32"]
    assert "--attention-backend fa3" in replaced["error"]
    assert replaced["values"]["kv_cache_quant_group_size"] == 32


ENGINE = """
import sys
import sglang
from sglang_oscar.errors import Int2Error

def main():
    try:
        sglang.Engine(model_path=sys.argv[1], device="cpu", kv_cache_dtype="int2", kv_cache_quant_group_size=48)
    except Int2Error as error:
        print("refused:", error)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def launches(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Real launches, two at a time because each spends its time on imports of one core."""
    script = tmp_path_factory.mktemp("engine") / "engine.py"
    script.write_text(ENGINE)
    server = [sys.executable, "-m", "sglang.launch_server"]
    serve = [str(Path(sys.executable).with_name("sglang")), "serve"]
    int2 = ["--model-path", str(qwen3), *INT2]
    too_many = {"SGLANG_MIXED_KV_RECENT_TOKENS": "8192"}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "budget": ([*server, *int2, "--max-running-requests", "1000000"], too_many),
        "argument": ([*server, *int2, "--enable-lmcache"], {}),
        "file": ([*server, *int2], {V: "/nonexistent/v.pt"}),
        "variable": ([*serve, *int2], {"SGLANG_OSCAR_K_CLIP_RATIO": "2"}),
        "engine": ([sys.executable, str(script), str(qwen3)], {}),
        "help": ([*server, "--help"], {}),
    }

    def run(command: list[str], extra: dict[str, str]) -> subprocess.CompletedProcess[str]:
        env = server_environment(HADAMARD | extra)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LAUNCH_TIMEOUT, check=False)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, *what) for name, what in commands.items()}


def printed_refusals(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of a process that are refusals."""
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(PREFIX)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("argument", "--enable-lmcache"),
        ("file", "/nonexistent/v.pt"),
        ("variable", "SGLANG_OSCAR_K_CLIP_RATIO='2'"),
    ],
)
def test_launches_end(name: str, expected: str, launches: dict[str, Future]) -> None:
    """``launch_server`` and ``sglang serve`` end with the same line, no traceback and a status other than 0."""
    done = launches[name].result()
    assert done.returncode == EXIT_CODE, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = printed_refusals(done)
    assert len(lines) == 1
    assert expected in lines[0]


def test_budget_too_small(launches: dict[str, Future]) -> None:
    """Found out in the worker, which knows the memory: one line with the numbers, and the server ends."""
    done = launches["budget"].result()
    assert done.returncode != 0
    lines = printed_refusals(done)
    assert len(lines) == 1, done.stderr
    assert "GiB is too small for int2 mode" in lines[0]
    for word in ("--max-running-requests", "SGLANG_MIXED_KV_RECENT_TOKENS", "--mem-fraction-static"):
        assert word in lines[0]


def test_engine_raises(launches: dict[str, Future]) -> None:
    """In Python a refusal is an exception, not the end of the process."""
    done = launches["engine"].result()
    assert done.returncode == 0, done.stderr
    assert "refused: --kv-cache-quant-group-size 48" in done.stdout


def test_help_shows_int2(launches: dict[str, Future]) -> None:
    done = launches["help"].result()
    assert done.returncode == 0, done.stderr
    choices = done.stdout.partition("--kv-cache-dtype {")[2].partition("}")[0]
    assert "int2" in choices.split(",")
    assert "--kv-cache-quant-group-size" in done.stdout
