"""Environment of a stock SGLang server on a machine without a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sglang_oscar.settings import PREFIXES

OUR_PREFIXES = (*PREFIXES, "DUMP_KVCACHE")
"""Beginnings of every variable of ours: what to drop for a server that must not inherit an experiment's settings."""
STAND_IN = Path(__file__).parent / "stand_in"


def has_gpu() -> bool:
    """Whether PyTorch sees an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (the process's own environment by default), made fit for the CPU where there is no GPU.

    SGLANG_USE_CPU_ENGINE selects SGLang's CPU paths; the stand-in for sgl_kernel goes on PYTHONPATH so that worker
    processes inherit it.
    """
    env = dict(os.environ if base is None else base)
    if has_gpu():
        return env
    paths = [str(STAND_IN), *filter(None, [env.get("PYTHONPATH")])]
    env.update(SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=os.pathsep.join(paths))
    # Threads that spin between small operations starve each other as soon as anything else wants a core.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env
