"""Which kernels extend takes on a GPU, what memory they need, and FlashInfer's side of it.

FlashInfer's ragged prefill attends to chunks and to dequantized prefixes where it is installed, the decode kernel to
prefixes of short chunks; else our own Triton kernel does all of it. The choice is made once, at start-up, and said in
the log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from oscar_kernels.extend_plan import INT_WORKSPACE_BYTES, Decode, Limits
from oscar_kernels.format import LayerFormat
from sglang_oscar.attention.decode_choice import break_even_tokens
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.geometry import Geometry
from sglang_oscar.memory.workspace import Workspace

if TYPE_CHECKING:
    from oscar_kernels.ragged_extend import RaggedExtend

LARGEST_WORKSPACE = 256 << 20
"""Bytes of dequantized prefix at a time: on Qwen3-8B 64K tokens of one layer."""
WORKSPACE_SHARE = 1 / 32
"""Largest share of the KV budget that the workspace takes on small GPUs."""
FEWEST_TOKENS = 1024
FEWEST_PASSES, MOST_PASSES = 8, 32
"""Workspace loads per layer; what needs more is read in place. Each has a plan of its own in memory."""
PLAN_SHARE = 1 / 256
"""Largest share of the KV budget that plans of more than the fewest passes take."""
VARIABLE = "SGLANG_OSCAR_EXTEND_BACKEND"
Choice = Literal["flashinfer", "triton"]


def choose(setting: str, device: str) -> Choice | None:
    """The backend that a setting means on a device; None on a CPU, which has the torch reference only.

    Args:
        setting: ``auto``, ``flashinfer`` or ``triton``.
        device: SGLang's --device.

    Raises:
        Int2Error: a backend is asked for that cannot be had.
    """
    if device != "cuda":
        if setting != "auto":
            raise Int2Error(f"{VARIABLE}={setting} needs --device cuda; unset it")
        return None
    installed = importlib.util.find_spec("flashinfer") is not None
    if setting == "flashinfer" and not installed:
        raise Int2Error(f"{VARIABLE}=flashinfer, but FlashInfer is not installed; pip install flashinfer-python")
    return "flashinfer" if installed and setting != "triton" else "triton"


def workspace(layer: LayerFormat, q_heads: int, dtype: torch.dtype, budget_bytes: int) -> Workspace:
    """What FlashInfer's kernels take of a KV budget on the current GPU.

    Args:
        layer: of the cache on this rank: any, heads are those of all.
        q_heads: query heads on this rank.
        dtype: of queries, keys and values.
        budget_bytes: of the KV cache.
    """
    from flashinfer.utils import determine_attention_backend

    device = torch.device("cuda", torch.cuda.current_device())
    head_dim = layer.head_dim
    kernels = determine_attention_backend(
        device, 0, False, False, dtype, dtype, head_dim_qk=head_dim, head_dim_vo=head_dim
    )
    scratch = 1 << 20
    if kernels == "fa2":
        # It splits long prefixes only while that takes no more than two blocks per multiprocessor, of 128 rows each.
        blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        scratch += blocks * -(-q_heads // layer.kv_heads) * 128 * (head_dim + 1) * 4
    token_bytes = layer.elements * dtype.itemsize
    most = min(LARGEST_WORKSPACE, int(WORKSPACE_SHARE * budget_bytes))
    passes = min(max(FEWEST_PASSES, int(PLAN_SHARE * budget_bytes) // INT_WORKSPACE_BYTES - 1), MOST_PASSES)
    return Workspace(max(FEWEST_TOKENS, most // token_bytes), token_bytes, q_heads, dtype, kernels, scratch, passes)


def ragged_extend(size: Workspace, geometry: Geometry, device: torch.device, decode: Decode) -> RaggedExtend:
    """Extend through FlashInfer, its kernels compiled and loaded, and ``decode`` for chunks of few tokens.

    Raises:
        Int2Error: FlashInfer cannot build its prefill kernels on this machine.
    """
    from oscar_kernels.ragged_extend import RaggedExtend

    # FA2 splits long prefixes itself.
    fa3 = size.kernels == "fa3"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if fa3 else 1
    wrappers = _wrappers(size, device)
    windows = geometry.windows
    window = (windows.sink + windows.recent) * size.token_bytes * len(geometry.formats) // geometry.cell_bytes
    limits = Limits(size.tokens, size.passes, break_even_tokens(decode), window)
    made = RaggedExtend(
        geometry.any_layer.key_layout, size.q_heads, size.dtype, limits, device, wrappers, decode, processors
    )
    try:
        # FlashInfer compiles at the first plan. That may take minutes, and may fail: better now than at a request.
        made.warm_up()
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Int2Error(
            f"FlashInfer cannot build its prefill kernels ({reason}); install the CUDA toolkit that it asks for, or "
            f"set {VARIABLE}=triton"
        ) from error
    return made


def _wrappers(size: Workspace, device: torch.device) -> Callable[[], Any]:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    scratch = torch.empty(size.scratch_bytes, dtype=torch.uint8, device=device)
    return lambda: BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD", backend=size.kernels)
