"""The unit tests, with the sources of a release that is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.releases import environment, installed, needs_newer_python, served

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sources are taken without compiled extensions"),
]
UNIT = Path(__file__).parents[1] / "unit"
OF_NO_RELEASE = (
    *("arrows", "bench", "bench_baselines", "bench_jobs", "decode_workspace", "environment", "file_process"),
    *("gptq_models", "guide", "import_order", "links", "local_server", "next_release", "packages", "quickstart_jobs"),
    *("refit_fits", "seat_tables", "sink_store", "stand_in_hybrids", "syntax", "troubleshooting", "unfinished_files"),
)
"""Unit tests that have nothing of SGLang: they pass where it cannot be imported."""
ENDS = "test_storage_files.py::test_processes_end_with_the_server"
"""Nor has this one, which starts interpreters."""


@pytest.mark.parametrize("version", served())
def test_unit_tests_pass(version: str) -> None:
    if installed() == version:
        pytest.skip("the tests themselves run on the installed release")
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    release = environment(version)
    release["PYTHONPATH"] = os.pathsep.join(filter(None, [release["PYTHONPATH"], env.get("PYTHONPATH")]))
    # Warm processes are of the tests, not of a release, and have imported another transformers than an older one wants.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", str(UNIT)]
    for name in ("warm", *OF_NO_RELEASE):
        command += ["--ignore", str(UNIT / f"test_{name}.py")]
    command += ["--deselect", f"test/unit/{ENDS}"]
    done = subprocess.run(
        command, env=env | release, cwd=UNIT.parents[1], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
