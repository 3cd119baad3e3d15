"""Importing this decides what has to be decided before any test module is imported; both conftest.py do."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Read when torch is imported; without it two busy processes slow each other down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Also of servers: two threads for every small operation take more than twice as long where no core is idle.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
# SGLang would generate a token and wait for a second, whenever it is asked whether it is healthy.
os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"

import torch
from hypothesis import HealthCheck, settings

from support.warm import pool

if not torch.cuda.is_available():
    # SGLang compiles helpers of MoE routers and of ranks, in every server: on a CPU that takes longer than all answers.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        # SGLang compiles what hashes keys of storage when the first prompt arrives, for 20 seconds and for the user's
        # cache; releases before 0.5.21 wait there forever for one that was killed meanwhile. Workers inherit it.
        os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)
    # Kernels of this process are bound to Triton's interpreter. What tests start is as users start it, so that warm
    # processes for servers are for tools, too.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]
if pool.wanted():
    pool.enable()

# No test may fail because the machine is busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
