"""The wheel alone, in an environment of its own and far from the repository: commands, and an int2 server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import sglang_oscar
from oscar_cpu.server import OUR_PREFIXES
from support.built import build, copy_sources
from support.reference import MODEL

pytestmark = pytest.mark.server
SERVE = """
import json, urllib.request
from pathlib import Path
from oscar_tools.local_server import serve

args = ["--kv-cache-dtype", "int2", "--random-seed", "0", "--mem-fraction-static", "0.5", "--max-total-tokens", "8192"]
body = {"text": "def add(a, b):", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
with serve("model", Path("log"), args) as server:
    request = urllib.request.Request(server.url + "/generate", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=600))
    said = json.load(urllib.request.urlopen(server.url + "/server_info", timeout=300))["internal_states"][0]["oscar"]
print(json.dumps([answer["meta_info"]["completion_tokens"], said["version"], said["codes"]]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel and this environment's other packages; ``.pth`` files of those are not read, so
    that an editable install is not seen."""
    work = tmp_path_factory.mktemp("clean")
    wheel = build("wheel", copy_sources(work / "source"), work / "dist")
    shutil.rmtree(work / "source")
    subprocess.run([sys.executable, "-m", "venv", str(work / "venv")], check=True)
    interpreter = work / "venv" / "bin" / "python"
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return interpreter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is used: a folder with a model and nothing else."""
    place = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(MODEL, place / "model")
    return place


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    base = {name: value for name, value in os.environ.items() if not name.startswith((*OUR_PREFIXES, "PYTHON"))}
    base.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=folder, env=base | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HADAMARD = {"SGLANG_OSCAR_K_ROTATION_PATH": "hadamard", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}


def test_commands(python: Path, folder: Path) -> None:
    oscar = python.with_name("oscar")
    assert "prove" in run([oscar, "--help"], folder)
    assert "touch points attached" in run([oscar, "doctor", "model"], folder, **HADAMARD)


def test_an_int2_server(python: Path, folder: Path) -> None:
    where = run([python, "-c", "import sglang_oscar, oscar_kernels; print(sglang_oscar.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    said = run([python, "-c", SERVE], folder, **HADAMARD)
    assert said.splitlines()[-1] == f'[8, "{sglang_oscar.__version__}", "keys 2, values 2"]'
