"""Prefill/decode disaggregation on machines without a GPU: what SGLang does with CUDA events there is left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.settings import active

EARLY = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def configure(args: Any) -> None:
    """Send cached prefixes with the rest of a prompt, as SGLang does where it is told so.

    Args:
        args: server arguments as the operator gave them.
    """
    if args.disaggregation_mode == "prefill" and args.device == "cpu":
        os.environ.setdefault(EARLY, "0")


def around_get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """A sender that takes page numbers as they are: SGLang would copy them from a GPU, behind an event."""
    found = original(transfer_backend, class_type)
    if active() is None or torch.cuda.is_available() or class_type.name != "SENDER":
        return found
    return type(found.__name__, (found,), {"supports_host_tensor_indices": False})
