"""Every benchmark script imports on a machine without a GPU and without FlashInfer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmark"
FOLDERS = sorted({path.parent for path in BENCHMARK.glob("*/*.py")} - {BENCHMARK / "test"})

# Modules of a folder import each other by name, as when a script of it is run.
IMPORT_ALL = """
import importlib, sys, traceback
sys.modules["flashinfer"] = None
sys.path.insert(0, sys.argv[1])
failed = 0
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except BaseException:
        failed += 1
        print(f"{name}:", traceback.format_exc(), file=sys.stderr)
sys.exit(failed)
"""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_script_imports(folder: Path) -> None:
    """Importing runs nothing and needs nothing that a CPU machine lacks."""
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    start: Path = folder
    if (folder / "__init__.py").exists():  # a package, whose script puts the folder above on the path
        start, names = folder.parent, [f"{folder.name}.{name}" for name in names]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT / part) for part in ("python", "kernels", "rotation", "scripts")]
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-c", IMPORT_ALL, str(start), *names]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
