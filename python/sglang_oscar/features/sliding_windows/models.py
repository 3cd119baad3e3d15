"""Which models with sliding-window layers are served, and why others are not.

Layers that attend to everything have an INT2 cache. Layers with a window keep SGLang's own, in the model's dtype.
"""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach.arguments import algorithm, drafts_with_model
from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attach.releases import argument
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import WINDOWS_APART

REASONS: dict[str, str] = {
    "Llama4": "iRoPE: its layers without RoPE scale queries by position, the others attend in chunks",
    "Gemma4": "layers with a window have heads of another size, and some layers share a cache",
    "MiMoV2": "several modalities, or drafts",
    "MuseSpark": "several modalities and layers of other kinds",
    "Inkling": "short convolutions keep states beside the cache",
    "DeepseekV4": "compressed attention",
}
"""By the beginning of an architecture's name: what stands in the way of it."""
UNTRIED = "it has not been tried"


def _drafts_branch(args: Any) -> bool:
    """Whether drafts are trees: SGLang's Triton counts a window from a token's place among the new ones, not from its
    depth."""
    return algorithm(args) is not None and not drafts_with_model(args) and args.speculative_ngram_max_bfs_breadth > 1


REFUSED: list[Refusal] = [
    (_drafts_branch, "with drafts that branch; set --speculative-ngram-max-bfs-breadth 1"),
    (lambda a: a.enable_torch_compile, "with torch.compile; drop --enable-torch-compile"),
    (
        # Pages beside rows in storage are states of hybrid models.
        lambda a: argument(a, "enable_hierarchical_cache", False) and argument(a, "hicache_storage_backend", None),
        "with storage; drop --hicache-storage-backend",
    ),
    (
        # SGLang takes 0 for -1, and None for a default of its own.
        lambda a: a.chunked_prefill_size is not None and a.chunked_prefill_size <= 0,
        "without chunked prefill; set --chunked-prefill-size",
    ),
]
"""Arguments that are refused with these models only. Without chunks a prompt would need a window pool of its length."""


def is_served(model: Any) -> bool:
    """Whether a model has sliding-window layers beside others, and is served.

    Args:
        model: SGLang's ModelConfig.
    """
    return bool(model.is_hybrid_swa) and not WINDOWS_APART.isdisjoint(model.hf_config.architectures)


def check(model: Any, server_args: Any = None) -> None:
    """Refuse models with sliding windows or sink logits that are not served, and arguments that do not go with others.

    Args:
        model: SGLang's ModelConfig.
        server_args: None where there are none yet.

    Raises:
        Int2Error: naming the model and what stands in the way.
    """
    architecture = model.hf_config.architectures[0]
    name = f"{model.model_path} ({architecture})"
    if not is_served(model):
        if not (model.is_hybrid_swa or model.has_attention_sinks):
            return
        if architecture in WINDOWS_APART:
            raise Int2Error(f"--kv-cache-dtype int2 needs a pool for windows: {name}; drop --disable-hybrid-swa-memory")
        why = next((why for begin, why in REASONS.items() if architecture.startswith(begin)), UNTRIED)
        raise Int2Error(
            f"--kv-cache-dtype int2 does not support this model with sliding-window attention layers ({why}): {name}; "
            "use --kv-cache-dtype auto"
        )
    for refused, what in REFUSED:
        if server_args is not None and refused(server_args):
            raise Int2Error(
                f"--kv-cache-dtype int2 does not support models with sliding-window attention layers {what}: {name}"
            )


def configure(args: Any, model: Any) -> None:
    """Name the attention backend that layers with a window are served by where the operator does not.

    SGLang's own choice on Hopper is FlashAttention-3, with which answers have not been found to be those of Triton.

    Args:
        args: server arguments as the operator gave them; they are written.
        model: SGLang's ModelConfig; None where it cannot be read.
    """
    if model is None or not is_served(model):
        return
    from sglang.srt.utils import is_cpu

    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    if not any(getattr(args, name) for name in names):
        args.attention_backend = CPU_BACKENDS[0] if is_cpu() else GPU_BACKEND


GPU_BACKEND = "triton"
CPU_BACKENDS = ("intel_amx", "torch_native")
"""Names of SGLang's backends for CPUs, of which models with windows accept the first; where its kernels are missing
SGLang takes the second in its place. :class:`oscar_cpu.window_attention.WindowAttention` answers to both."""
