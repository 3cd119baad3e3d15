"""Which kernels extend takes on a GPU, and what memory they need.

A stock kernel attends to chunks and to dequantized prefixes, the FlashAttention that SGLang brings for the GPU or
FlashInfer's ragged prefill, and the decode kernel to prefixes of short chunks; else our own Triton kernel does all of
it. The choice is made once, at start-up, and said in the log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from oscar_kernels.extend_plan import INT_WORKSPACE_BYTES, Decode, Limits, Ragged
from oscar_kernels.format import AnyFormat
from oscar_rotation.errors import first_line
from sglang_oscar.attention import stock_check
from sglang_oscar.attention.decode_choice import break_even_tokens
from sglang_oscar.attention.extend_workspace import FLASH_ATTENTION, ExtendWorkspace, StockBackend
from sglang_oscar.attention.flash_attention3 import FlashAttention3
from sglang_oscar.attention.flash_attention4 import FlashAttention4
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import Geometry

if TYPE_CHECKING:
    from oscar_kernels.ragged_extend import CopyPrefixes, RaggedExtend

LARGEST_WORKSPACE = 512 << 20
"""Bytes of dequantized prefix at a time: on Qwen3-8B 128K tokens of one layer."""
WORKSPACE_SHARE = 1 / 32
"""Largest share of the KV budget that the workspace takes on small GPUs."""
FEWEST_TOKENS = 1024
FEWEST_PASSES, MOST_PASSES = 8, 32
"""ExtendWorkspace loads per layer; what needs more is read in place. Each has a plan of its own in memory."""
PLAN_SHARE = 1 / 256
"""Largest share of the KV budget that plans of more than the fewest passes take."""
VARIABLE = "SGLANG_OSCAR_EXTEND_BACKEND"
VERSIONS: dict[Literal["fa4", "fa3"], type[FlashAttention3]] = {"fa4": FlashAttention4, "fa3": FlashAttention3}
"""Of FlashAttention, the newer first."""
Choice = Literal["flashinfer", "fa3", "fa4", "triton"]
Setting = Literal["auto", "flashinfer", "fa3", "fa4", "triton"]
Heads = tuple[int, int]
"""Channels of a head of keys and of values."""


def choose(setting: Setting, device: str, heads: Heads, sink_logits: bool) -> Choice | None:
    """The backend that a setting means on a device; None on a CPU, which has the torch reference only.

    Args:
        setting: ``auto`` or a backend.
        device: SGLang's --device.
        heads: channels of a head of keys and of values.
        sink_logits: whether the model has them; then FlashAttention, of which that is not known to be right, is taken
            where it is asked for only.

    Raises:
        Int2Error: a backend is asked for that cannot be had.
    """
    if device != "cuda":
        if setting != "auto":
            raise Int2Error(f"{VARIABLE}={setting} needs --device cuda; unset it")
        return None
    if setting in ("fa3", "fa4"):
        if (reason := flash_attention(heads)[setting]) is not None:
            raise Int2Error(f"{VARIABLE}={setting}, but {reason}; unset it")
        return setting
    if why_not_flash(setting, heads, sink_logits) is None:
        return next(backend for backend, reason in flash_attention(heads).items() if reason is None)
    installed = importlib.util.find_spec("flashinfer") is not None
    if setting == "flashinfer" and not installed:
        raise Int2Error(f"{VARIABLE}=flashinfer, but FlashInfer is not installed; pip install flashinfer-python")
    return "flashinfer" if installed and setting != "triton" else "triton"


def flash_attention(heads: Heads) -> dict[Literal["fa4", "fa3"], str | None]:
    """Versions that SGLang brings, the newer first, and why each cannot be had on this GPU; None where it can."""
    return {backend: version.missing(*heads) for backend, version in VERSIONS.items()}


def why_not_flash(setting: str, heads: Heads, sink_logits: bool) -> str | None:
    """Why ``auto`` takes no FlashAttention, or that another backend is asked for; None where it takes one.

    Args:
        setting, heads, sink_logits: as in :func:`choose`.
    """
    if setting != "auto":
        return f"{VARIABLE}={setting}"
    if sink_logits:
        return "the model has sink logits"
    if not torch.cuda.is_available():
        return "there is no GPU"
    reasons = flash_attention(heads)
    if None in reasons.values():
        return None
    return "; ".join(f"{FLASH_ATTENTION[backend]}: {reason}" for backend, reason in reasons.items())


def workspace(
    backend: StockBackend, layer: AnyFormat, q_heads: int, dtype: torch.dtype, budget_bytes: int
) -> ExtendWorkspace:
    """What a stock kernel takes of a KV budget on the current GPU.

    Args:
        backend: that brings it.
        layer: of the cache on this rank: any, heads are those of all.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        budget_bytes: of the KV cache.
    """
    token_bytes = layer.elements * dtype.itemsize
    most = min(LARGEST_WORKSPACE, int(WORKSPACE_SHARE * budget_bytes))
    tokens = max(FEWEST_TOKENS, most // token_bytes)
    if backend != "flashinfer":
        return ExtendWorkspace(tokens, token_bytes, q_heads, dtype, backend, backend, 0, 0, MOST_PASSES)
    kernels, scratch = _flashinfer_kernels(layer, q_heads, dtype)
    passes = min(max(FEWEST_PASSES, int(PLAN_SHARE * budget_bytes) // INT_WORKSPACE_BYTES - 1), MOST_PASSES)
    return ExtendWorkspace(tokens, token_bytes, q_heads, dtype, backend, kernels, scratch, INT_WORKSPACE_BYTES, passes)


def _flashinfer_kernels(layer: AnyFormat, q_heads: int, dtype: torch.dtype) -> tuple[Literal["fa2", "fa3"], int]:
    """FlashInfer's family of kernels on this GPU, and bytes that it needs for partial results."""
    from flashinfer.utils import determine_attention_backend

    device = torch.device("cuda", torch.cuda.current_device())
    kernels: Any = determine_attention_backend(
        device, 0, False, False, dtype, dtype, head_dim_qk=layer.head_dim, head_dim_vo=layer.value_head_dim
    )
    scratch = 1 << 20
    if kernels == "fa2":
        # It splits long prefixes only while that takes no more than two blocks per multiprocessor, of 128 rows each.
        blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        scratch += blocks * -(-q_heads // layer.kv_heads) * 128 * (layer.value_head_dim + 1) * 4
    return kernels, scratch


def ragged_extend(
    size: ExtendWorkspace, geometry: Geometry, device: torch.device, decode: Decode, copy: CopyPrefixes
) -> RaggedExtend:
    """Extend through a stock kernel, compiled and loaded, with prefixes by ``copy``, and ``decode`` for chunks of few
    tokens.

    Raises:
        Int2Error: the kernel cannot be built or loaded on this machine.
    """
    from oscar_kernels.ragged_extend import RaggedExtend
    from oscar_kernels.ragged_plan import RaggedPlanner

    # Some split long prefixes themselves.
    splits_itself = size.kernels == "fa2" if size.backend == "flashinfer" else bool(VERSIONS[size.backend].splitting)
    processors = 1 if splits_itself else torch.cuda.get_device_properties(device).multi_processor_count
    windows = geometry.windows
    window = (windows.sink + windows.recent) * size.token_bytes * len(geometry.formats) // geometry.cell_bytes
    limits = Limits(size.tokens, size.passes, break_even_tokens(decode), window, joined=True)
    layer = geometry.any_layer
    try:
        planner = RaggedPlanner(layer, size.q_heads, size.dtype, limits, device, _kernels(size, device), processors)
        made = RaggedExtend(planner, decode, copy)
        # FlashInfer compiles at the first plan. That may take minutes, and may fail: better now than at a request.
        made.warm_up()
        wrong = None
        # On Hopper version 3 is what is tested and measured, with heads of one size.
        tested = size.backend not in FLASH_ATTENTION or torch.cuda.get_device_capability(device) == (9, 0)
        if not tested or layer.head_dim != layer.value_head_dim:
            like = torch.empty(0, dtype=size.dtype, device=device)
            heads = (layer.kv_heads, layer.head_dim, layer.value_head_dim)
            wrong = stock_check.differs(_kernels(size, device), size.q_heads, heads, like)
    except torch.cuda.OutOfMemoryError:
        raise  # says itself what is missing
    except Exception as error:
        raise Int2Error(_unusable(size, first_line(error))) from error
    if wrong is not None:
        raise Int2Error(_unusable(size, wrong))
    return made


def _unusable(size: ExtendWorkspace, reason: str) -> str:
    if size.backend in FLASH_ATTENTION:
        return f"{size.kernel} cannot be used on this GPU ({reason}); set {VARIABLE}=flashinfer or triton"
    return (
        f"FlashInfer cannot build its prefill kernels ({reason}); install the CUDA toolkit that it asks for, or set "
        f"{VARIABLE}=triton"
    )


def _kernels(size: ExtendWorkspace, device: torch.device) -> Callable[[], Ragged]:
    if size.backend != "flashinfer":
        made = VERSIONS[size.backend]
        return lambda: made(device)
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper
    scratch = torch.empty(size.scratch_bytes, dtype=torch.uint8, device=device)
    return lambda: wrapper(scratch, "NHD", backend=size.kernels)
