"""What int2 mode serves of ranks with batches of their own, by server arguments and models."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach.arguments import algorithm, disaggregated, replicas
from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attach.releases import switched_on
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import linear_config, window_layer_ids
from sglang_oscar.settings import Settings, variable

TITLE = "Data-parallel attention and pipelines"

WITH_ARGUMENTS: list[Refusal] = [
    (lambda a: algorithm(a) is not None, "with speculative decoding; drop --speculative-algorithm"),
    # No hit outlives its sink block: pages in host memory would wait in vain.
    (lambda a: a.enable_hierarchical_cache, "with hierarchical caching; drop --enable-hierarchical-cache"),
    (disaggregated, "with disaggregation; drop --disaggregation-mode"),
    (lambda a: a.enable_torch_compile, "with torch.compile; drop --enable-torch-compile"),
    (lambda a: a.pp_size > 1 and replicas(a) > 1, "with pipeline parallelism; set --pp-size 1"),
    (
        lambda a: a.pp_size > 1 and switched_on("SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM"),
        "without results of chunks; unset SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM",
    ),
    (lambda a: a.enable_lora or a.lora_paths, "with LoRA; drop --enable-lora and --lora-paths"),
]
WITH_MODELS: list[Refusal] = [
    (
        lambda m: linear_config(m) is not None or bool(window_layer_ids(m)) or bool(m.is_multimodal),
        "with hybrid models, sliding windows or images",
    ),
]
"""Both are refused beside ranks with batches of their own; nobody has tried them there."""


def kind(args: Any) -> str | None:
    """What lets ranks run batches of their own; None where all run the same at the same time."""
    if replicas(args) > 1:
        return "data-parallel attention"
    return "pipeline parallelism" if args.pp_size > 1 else None


def refuse(args: Any, given: Any, table: list[Refusal]) -> None:
    """Refuse what does not go with ranks that run batches of their own.

    Args:
        args: server arguments, resolved or not.
        given: what the table asks: these arguments, or SGLang's ModelConfig.
        table: of refusals.

    Raises:
        Int2Error: naming both.
    """
    if (ranks := kind(args)) is not None:
        for refused, what in table:
            if refused(given):
                raise Int2Error(f"--kv-cache-dtype int2 does not support {ranks} {what}")


def configure(args: Any, model: Any) -> None:
    """Refuse before SGLang resolves: it stops at some with a traceback."""
    refuse(args, args, WITH_ARGUMENTS)


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse by what SGLang has resolved.

    Raises:
        Int2Error: naming what does not go together.
    """
    refuse(args, args, WITH_ARGUMENTS)
    refuse(args, model, WITH_MODELS)
    if settings.kept_windows and (ranks := kind(args)) is not None:
        raise Int2Error(f"{variable('kept_windows')} does not go with {ranks}; unset it")
