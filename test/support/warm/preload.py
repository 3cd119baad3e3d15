"""What a fork server imports: the third-party modules that SGLang imports, in its order, and nothing that is tested."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading

MODULES = tuple(
    """
    numpy psutil requests torch triton PIL.Image starlette.routing torchvision.io transformers
    transformers.generation.configuration_utils transformers.modeling_gguf_pytorch_utils
    transformers.models.llama.modeling_llama transformers.image_processing_utils IPython.display pydantic aiohttp
    msgspec zmq transformers.models.auto.tokenization_auto openai.types.responses xgrammar lxml.etree
    cuda.bindings.runtime torch._dynamo.repro.after_dynamo torch._inductor.compile_fx compressed_tensors.config
    flashinfer gguf torch.utils.cpp_extension opentelemetry.propagate triton_kernels.matmul_ogs
    triton_kernels.matmul flashinfer.comm fsspec huggingface_hub aiohttp.web uvicorn fastapi uvloop
    openai.types.realtime pydantic.v1 tabulate torchao scipy.signal
    """.split()  # noqa: SIM905
)
"""Found with ``python -X importtime``; some are in the oldest or the newest release's pins only."""
OWN = ("sglang", "sgl_kernel", "oscar_", "reference_model", "prometheus_client")
"""Beginnings of modules that every process must import itself: what is tested, and what reads variables of SGLang."""


def load() -> dict[str, str]:
    """Import ``MODULES``, as far as they are installed, and return the environment variables that this has set.

    Raises:
        RuntimeError: the process must not be forked now.
    """
    before = dict(os.environ)
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            # Packages move their modules between the versions that releases of SGLang pin.
            if not f"{name}.".startswith(f"{missing.name}."):
                raise
    if own := [name for name in sys.modules if name.startswith(OWN)]:
        raise RuntimeError(f"a library imports what every process must import itself: {own}")
    # Threads of OpenBLAS and jemalloc do not count: these libraries end theirs before a fork and start them after it.
    if threading.active_count() > 1:
        raise RuntimeError(f"a library has started threads: {threading.enumerate()}")
    gc.collect()
    # Objects from here are never looked at again, so children do not copy their pages for counters of the collector.
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}
