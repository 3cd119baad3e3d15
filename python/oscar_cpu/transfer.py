"""Prefill/decode disaggregation on machines without a GPU: what SGLang does with CUDA events there is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.worker import active

EARLY = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
HOST_MEMORY = "DRAM"
"""To nixl."""


def configure(args: Any, model: Any) -> None:
    """Send cached prefixes with the rest of a prompt, as SGLang does where it is told so.

    Args:
        args: server arguments as the operator gave them.
        model: SGLang's ModelConfig; None where it cannot be read.
    """
    if args.disaggregation_mode == "prefill" and args.device == "cpu":
        os.environ.setdefault(EARLY, "0")


def around_get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """What SGLang's classes of a backend are on a machine without a GPU.

    A sender takes page numbers as they are: SGLang would copy them from a GPU, behind an event. The manager of nixl
    names host memory, where SGLang's says that caches are on a GPU.
    """
    found = original(transfer_backend, class_type)
    if active() is None or torch.cuda.is_available():
        return found
    if class_type.name == "SENDER":
        return type(found.__name__, (found,), {"supports_host_tensor_indices": False})
    if class_type.name == "MANAGER" and transfer_backend.name == "NIXL":
        return type(found.__name__, (found,), {"register_buffer_to_engine": _register_host_buffers(found)})
    return found


def _register_host_buffers(manager: type) -> Callable[[Any], None]:
    def register(self: Any) -> None:
        self.agent = HostAgent(self.agent)
        manager.register_buffer_to_engine(self)  # type: ignore[attr-defined]

    return register


class HostAgent:
    """A nixl agent to which all memory is host memory.

    Args:
        agent: does the work.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, regions: Any, kind: str) -> Any:
        """As nixl's."""
        return self._agent.register_memory(regions, HOST_MEMORY)

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        """As nixl's."""
        return self._agent.get_xfer_descs(regions, HOST_MEMORY)

    def prep_xfer_dlist(self, peer: str, regions: Any, kind: str | None = None) -> Any:
        """As nixl's."""
        return self._agent.prep_xfer_dlist(peer, regions, HOST_MEMORY)
