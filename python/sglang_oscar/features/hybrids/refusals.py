"""What int2 mode cannot do with a hybrid model; see :mod:`sglang_oscar.attach.refusals`."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attach.releases import (
    argument,
    carries_slot_states,
    finds_states_of_mamba2,
    keeps_states_of,
    tells_kept_states_apart,
)
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import linear_config

MAMBA2 = frozenset({"FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"})
"""Mamba2 between or beside layers of grouped-query attention."""
MODELS = frozenset(
    {
        *MAMBA2,
        "Qwen3NextForCausalLM",
        *(f"Qwen3_5{kind}For{head}" for kind in ("", "Moe") for head in ("ConditionalGeneration", "CausalLM")),
    }
)
"""Hybrid models that are served: others have the gated delta rule between such layers."""


def _strategy(args: Any) -> str:
    return str(argument(args, "mamba_radix_cache_strategy", "auto"))


def _mistakes_states(args: Any) -> bool:
    """Whether SGLang's prefix cache would get states of other positions than it says; so it does with any cache."""
    return not (args.disable_overlap_schedule or args.disable_radix_cache or tells_kept_states_apart())


ARGUMENTS: list[Refusal] = [
    (lambda a: a.enable_torch_compile, "with torch.compile; drop --enable-torch-compile"),
    (
        # States would come back from the host without the windows beside them.
        lambda a: a.enable_hierarchical_cache and not carries_slot_states(),
        "with hierarchical caching before SGLang 0.5.22; drop --enable-hierarchical-cache",
    ),
    (
        # Others take states from where they lie, and SGLang refuses that of states with something beside them.
        lambda a: a.enable_hierarchical_cache and a.hicache_storage_backend not in (None, "file"),
        "with storage other than files; set --hicache-storage-backend file",
    ),
    (
        lambda a: a.enable_hierarchical_cache and a.hicache_mem_layout == "layer_first",
        "with host memory by layers; set --hicache-mem-layout page_first",
    ),
    (
        lambda a: _strategy(a) not in ("auto", "extra_buffer", "extra_buffer_lazy"),
        "with states kept otherwise; drop --mamba-radix-cache-strategy",
    ),
    (
        lambda a: a.linear_attn_backend != "triton",
        "with linear attention that keeps no states within a chunk; drop --linear-attn-backend",
    ),
    (
        # FlashInfer's keeps them; SGLang takes it by itself on Hopper and Blackwell.
        lambda a: argument(a, "linear_attn_prefill_backend", None) not in (None, "triton", "flashinfer"),
        "with linear attention that keeps no states within a chunk; drop --linear-attn-prefill-backend",
    ),
    (
        lambda a: argument(a, "enable_int8_mamba_checkpoint", False),
        "with states in 8 bits; drop --enable-int8-mamba-checkpoint",
    ),
    (
        lambda a: argument(a, "enable_linear_replayssm", False) or argument(a, "enable_linear_replayssm_spec", False),
        "with replayed states; drop --enable-linear-replayssm and --enable-linear-replayssm-spec",
    ),
    (
        # They end within pages. SGLang then keeps a state for the page before, or, in older releases, one that it lost.
        lambda a: a.enable_mixed_chunk,
        "with mixed chunks; drop --enable-mixed-chunk",
    ),
    (
        _mistakes_states,
        "with overlap scheduling in SGLang 0.5.17, which mistakes states; set --disable-overlap-schedule",
    ),
]
"""Arguments that are refused with a hybrid model only."""


MAMBA2_ARGUMENTS: list[Refusal] = [
    # What verifies them exists as kernels of a GPU only, where nobody has tried it.
    (lambda a: a.speculative_algorithm is not None, "with speculative decoding; drop --speculative-algorithm"),
]
"""Arguments that are refused with models of Mamba2 besides."""


def check_model(model: Any, server_args: Any) -> None:
    """Refuse hybrid models that are not served, and arguments that do not go with the others.

    Args:
        model: SGLang's ModelConfig.
        server_args: None where there are none yet.

    Raises:
        Int2Error: naming the model and the feature.
    """
    if linear_config(model) is None:
        return
    name = f"{model.model_path} ({', '.join(model.hf_config.architectures)})"
    if MODELS.isdisjoint(model.hf_config.architectures):
        raise Int2Error(
            f"--kv-cache-dtype int2 does not support this hybrid linear attention: {name}; use --kv-cache-dtype auto"
        )
    if not keeps_states_of(model.hf_config.architectures[0]):
        raise Int2Error(
            f"--kv-cache-dtype int2 does not support {name} in this release of SGLang, which keeps no states of it; "
            "install sglang 0.5.19 or later"
        )
    arguments = ARGUMENTS if MAMBA2.isdisjoint(model.hf_config.architectures) else ARGUMENTS + MAMBA2_ARGUMENTS
    if arguments is not ARGUMENTS and not finds_states_of_mamba2():
        raise Int2Error(
            f"--kv-cache-dtype int2 does not support {name} in this release of SGLang, which mistakes states where "
            "prompts are computed at once; install sglang 0.5.20 or later"
        )
    for refused, what in arguments:
        if server_args is not None and refused(server_args):
            raise Int2Error(f"--kv-cache-dtype int2 does not support hybrid models {what}: {name}")
