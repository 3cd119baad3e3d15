"""Calibration of the reference model by the drivers, as the end-to-end tests share it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import ModelSettings, model_settings
from oscar_tools.calibration.dump_driver import DumpTask, run_dump
from oscar_tools.calibration.folders import CalibrationFolder, dump_state
from oscar_tools.calibration.rotation_driver import run_fit
from support.benchmark_data import write_rows
from support.reference import MODEL, ROOT, document
from support.warm import stand_in

SMALL = ("--mem-fraction-static", "0.5", "--max-total-tokens", "16384")
TOKENS = 1500
GROUP = 64


def calibration_data(path: Path) -> Path:
    """Five documents as JSON lines."""
    return write_rows(path, [{"text": document(450, 900 + seed, facts=1).text} for seed in range(5)])


def settings() -> ModelSettings:
    """Of the reference model."""
    return model_settings(str(MODEL)).overridden(group_size=GROUP, server_args=())


def dump_request(root: Path, data: Path, covariances: bool = False) -> DumpTask:
    """A dump of the reference model."""
    return DumpTask(settings(), root, str(data), TOKENS, covariances=covariances, server_args=SMALL)


def calibrate(root: Path, data: Path) -> CalibrationFolder:
    """A calibration of the reference model whose first dump was interrupted the hardest way."""
    command = [sys.executable, "-m", "oscar_tools", "dump", str(MODEL), "--root", str(root)]
    command += ["--dataset", str(data), "--tokens", str(TOKENS), "--group-size", str(GROUP)]
    command += ["--server-args", " ".join(SMALL)]
    interrupt(command, {}, root.with_name("dump.log"), lambda: bool(list(root.rglob("manifest.json"))))
    (manifest,) = root.rglob("manifest.json")
    assert dump_state(manifest.parent) == "interrupted"
    folder = run_dump(dump_request(root, data))
    assert folder.dump == manifest.parent
    assert dump_state(folder.dump) == "complete"
    run_fit(folder, "paper", FitOptions(fit_clip=True, report=True, group_size=GROUP, holdout_tokens=200), "cpu")
    return folder


def script(name: str, *arguments: str) -> list[str]:
    """Command line of a script under ``rotation/``."""
    return ["bash", str(ROOT / "rotation" / name), *arguments]


def run_script(name: str, *arguments: str, status: int = 0) -> str:
    """Run a script under ``rotation/`` to its end, with this exit status, and return what it said."""
    done = subprocess.run(
        script(name, *arguments), env=_environment(), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def interrupt(command: list[str], env: dict[str, str], log: Path, when: Callable[[], bool]) -> None:
    """Start a command and kill it and its children as soon as ``when`` holds; servers die with what started them."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=_environment() | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + 600
    try:
        while not when():
            assert process.poll() is None, f"it ended before it was interrupted: {log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHON": stand_in.executable()}
