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
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang_oscar.attach.refusals import ARGUMENTS, MODELS
from sglang_oscar.attach.releases import field_defaults
from sglang_oscar.errors import EXIT_CODE
from support.launch_cases import run_cases
from support.models import save
from support.refusal_cases import FLAGS as COMMON_FLAGS
from support.refusal_cases import MODEL_CASES, RECENT_FLAGS, VARIABLES, K, V, broken_files
from support.servers import HADAMARD, LAUNCH_TIMEOUT, server_environment

pytestmark = pytest.mark.server

FIELDS = field_defaults(ServerArgs)
FLAGS = COMMON_FLAGS + [flags for field, flags in RECENT_FLAGS.items() if field in FIELDS]
PREFIX = "sglang-oscar: error: "
INT2 = ["--device", "cpu", "--kv-cache-dtype", "int2", "--skip-tokenizer-init"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    return broken_files(tmp_path_factory.mktemp("rotations"))


@pytest.fixture(scope="module")
def outcomes(model: Path, files: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What happens to every case: key -> result of ``support.launch_cases``."""
    base = ["--model-path", str(model), *INT2]
    cases: dict[Any, dict[str, Any]] = {flags: {"argv": [*base, *flags.split()]} for flags in FLAGS}
    cases |= {(name, value): {"argv": base, "env": {name: value}} for name, value in VARIABLES}
    cases |= {case: {"argv": base, "env": {variable: path}} for case, (variable, path) in files.items()}
    for name, (config, architecture, _) in MODEL_CASES.items():
        folder = tmp_path_factory.mktemp(name)
        made = config()
        made.architectures = [architecture]
        made.save_pretrained(folder)
        cases["model", name] = {"argv": ["--model-path", str(folder), *INT2]}
    accepted = [
        "--attention-backend fa3 --kv-cache-quant-group-size 32",
        "--page-size 128",
        "--elastic-ep-backend none",
        "--enable-hierarchical-cache",
        "--enable-hierarchical-cache --hicache-storage-backend file --hicache-mem-layout layer_first",
        "--speculative-algorithm NGRAM",
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 64 --speculative-ngram-max-bfs-breadth 1",
    ]
    cases |= {("accepted", flags): {"argv": [*base, *flags.split()]} for flags in ["", *accepted]}
    stream = {"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}
    cases["plan stream"] = {"argv": [*base, "--speculative-algorithm", "NGRAM"], "env": stream}
    cases["accepted", "plan stream"] = {"argv": base, "env": stream}
    recorded = {"SGLANG_ENABLE_METADATA_GLUE_GRAPH": "1"}
    cases["recorded preparation"] = {"argv": base, "env": recorded}
    cases["unset K"] = {"argv": base, "unset": [K]}
    cases["unset V"] = {"argv": base, "unset": [V]}
    plain = ["--model-path", str(model), "--device", "cpu", "--skip-tokenizer-init"]
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


@pytest.mark.parametrize("flags", FLAGS)
def test_flags(flags: str, outcomes: dict) -> None:
    """The line names a flag that was given."""
    line = refusal(outcomes[flags])
    assert any(word in line for word in flags.split() if word.startswith("--")), line


def test_a_stream_of_plans(outcomes: dict) -> None:
    """Refused with speculation; without it SGLang has no use for it."""
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM" in refusal(outcomes["plan stream"])


def test_recorded_preparation(outcomes: dict) -> None:
    """Tables of rings and sinks would be those of the step that was recorded; older releases cannot do it."""
    outcome = outcomes["recorded preparation"]
    if hasattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        assert "SGLANG_ENABLE_METADATA_GLUE_GRAPH" in refusal(outcome)
    else:
        assert outcome["status"] == 0, outcome["error"]


def test_every_refused_argument_is_among_the_flags(outcomes: dict) -> None:
    """No row of the table is dead: each refuses at least one of the command lines above."""
    lines = [refusal(outcomes[flags]) for flags in FLAGS]
    for _, what in ARGUMENTS:
        named = {word.lstrip("-").replace("-", "_") for word in what.split() if word.startswith("--")}
        assert any(line.endswith(what) for line in lines) or not named & FIELDS.keys(), what


@pytest.mark.parametrize(("name", "value"), VARIABLES)
def test_variables(name: str, value: str, outcomes: dict) -> None:
    """The line names the variable and, where the value is at fault, the value."""
    line = refusal(outcomes[name, value])
    assert name in line
    assert value in line or "is not a setting" in line or name == "DUMP_KVCACHE"


@pytest.mark.parametrize("case", ["unset K", "unset V"])
def test_unset_rotations(case: str, outcomes: dict) -> None:
    line = refusal(outcomes[case])
    assert (K if case.endswith("K") else V) in line
    assert "hadamard" in line
    assert "identity" in line


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "folder",
        "truncated",
        "garbage",
        "nan",
        "not_orthogonal",
        "wrong_shape",
        "wrong_layer_count",
        "swapped",
    ],
)
def test_rotation_files(case: str, files: dict[str, tuple[str, str]], outcomes: dict) -> None:
    """The line names the variable and the file."""
    variable, path = files[case]
    line = refusal(outcomes[case])
    assert variable in line
    assert path in line


@pytest.mark.parametrize("name", MODEL_CASES)
def test_models(name: str, outcomes: dict) -> None:
    line = refusal(outcomes["model", name])
    assert MODEL_CASES[name][2] in line
    assert "--kv-cache-dtype auto" in line


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
def launches(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Real launches, two at a time because each spends its time on imports of one core."""
    script = tmp_path_factory.mktemp("engine") / "engine.py"
    script.write_text(ENGINE)
    server = [sys.executable, "-m", "sglang.launch_server"]
    serve = [str(Path(sys.executable).with_name("sglang")), "serve"]
    int2 = ["--model-path", str(model), *INT2]
    too_many = {"SGLANG_MIXED_KV_RECENT_TOKENS": "8192"}
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "budget": ([*server, *int2, "--max-running-requests", "1000000"], too_many),
        "argument": ([*server, *int2, "--enable-lora"], {}),
        "file": ([*server, *int2], {V: "/nonexistent/v.pt"}),
        "variable": ([*serve, *int2], {"SGLANG_OSCAR_K_CLIP_RATIO": "2"}),
        "engine": ([sys.executable, str(script), str(model)], {}),
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
        ("argument", "--enable-lora"),
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
