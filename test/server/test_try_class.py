"""``oscar try-class``: stock SGLang and int2 mode in forked processes, without HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models import save
from support.servers import server_environment

pytestmark = [pytest.mark.server, pytest.mark.skipif(torch.cuda.is_available(), reason="it hides GPUs from itself")]


def test_a_class_passes(tmp_path: Path) -> None:
    """Weights are not read: the configuration is enough."""
    model = save("qwen3", tmp_path / "model")
    (model / "model.safetensors").unlink()
    command = [sys.executable, "-m", "oscar_tools", "try-class", str(model)]
    done = subprocess.run(
        command, env=server_environment({}), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{model}: passed: drift 0.0" in done.stdout
