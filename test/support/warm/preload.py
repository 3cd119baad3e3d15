"""What a fork server imports: the third-party modules that SGLang imports, in its order, and nothing that is tested.

For servers on a CPU also what a worker of SGLang has imported before plugins are loaded, so that the order of imports
and hooks is that of users, but for the models, which a scheduler imports after its hooks. The scheduler itself is not
here: whether a process has imported it decides what is hooked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import ItemsView, Iterator

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
SGLANG = ("sglang.srt.managers.detokenizer_manager", "sglang.srt.models.registry")
"""What every worker imports, and the models. These have read variables of SGLang, which then count."""
SERVER = "SGLANG_USE_CPU_ENGINE"
"""Environment variable of servers on a CPU."""
OLD = "SGL_"
"""Old beginning of SGLang's variables, which it renames while it is imported."""
OWN = ("sglang_oscar", "oscar_", "reference_model", "prometheus_client")
"""Beginnings of modules that every process must import itself: what is tested, and what reads more variables."""


def load() -> tuple[dict[str, str], set[str]]:
    """Import ``MODULES``, as far as they are installed, and ``SGLANG`` for servers on a CPU.

    Returns:
        the environment variables that this has set, and the names of those that it has looked for.

    Raises:
        RuntimeError: the process must not be forked now.
    """
    before = dict(os.environ)
    forbidden = OWN
    with reads() as read:
        for name in MODULES:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as missing:
                # Packages move their modules between the versions that releases of SGLang pin.
                if not f"{name}.".startswith(f"{missing.name}."):
                    raise
        if SERVER in before:
            for name in SGLANG:
                importlib.import_module(name)
        else:
            forbidden += ("sglang", "sgl_kernel")
    if own := [name for name in sys.modules if name.startswith(forbidden)]:
        raise RuntimeError(f"a library imports what every process must import itself: {own}")
    # Threads of OpenBLAS and jemalloc do not count: these libraries end theirs before a fork and start them after it.
    if threading.active_count() > 1:
        raise RuntimeError(f"a library has started threads: {threading.enumerate()}")
    gc.collect()
    # Objects from here are never looked at again, so children do not copy their pages for counters of the collector.
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}, read


@contextlib.contextmanager
def reads() -> Iterator[set[str]]:
    """Names of the environment variables that are looked for, set or not, in the ``with`` block.

    Who goes through all of them looks for a beginning: libraries for one of their own, and SGLang for :data:`OLD`.
    """
    names: set[str] = set()
    kind = type(os.environ)
    stock = kind.__getitem__

    def getitem(environment: os._Environ[str], name: str) -> str:
        names.add(name)
        return stock(environment, name)

    def items(environment: os._Environ[str]) -> ItemsView[str, str]:
        names.update(name for name in environment if name.startswith(OLD))
        return {name: stock(environment, name) for name in environment}.items()

    kind.__getitem__ = getitem  # type: ignore[method-assign]
    kind.items = items  # type: ignore[assignment, method-assign]
    try:
        yield names
    finally:
        kind.__getitem__ = stock  # type: ignore[method-assign]
        del kind.items
