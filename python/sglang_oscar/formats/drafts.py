"""The model that drafts: SGLang's configuration of it, and what makes its rows those of no other."""

from __future__ import annotations

from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import algorithm
from sglang_oscar.formats.model_identity import configuration
from sglang_oscar.formats.origin import loaded_weights, of_drafts

OF_MODEL = (None, "auto")
"""``--speculative-draft-kv-cache-dtype`` of a cache in the draft model's own type."""
FP8 = "fp8_e4m3"
"""Numbers of 8 bits without scales, as SGLang stores them."""
NAMED = {FP8: torch.float8_e4m3fn, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
"""Its other values that are served."""


def cache_dtype(server_args: Any, draft: Any) -> torch.dtype:
    """The type of the numbers in a draft model's cache.

    Args:
        server_args: SGLang's ServerArgs, resolved.
        draft: SGLang's ModelConfig of the draft model.
    """
    named = releases.argument(server_args, "speculative_draft_kv_cache_dtype", None)
    dtype: torch.dtype = NAMED.get(named, draft.dtype)
    return dtype


def config_of(server_args: Any) -> Any:
    """SGLang's ModelConfig of the draft model, which is the model itself where it brings its draft layer along.

    Args:
        server_args: SGLang's ServerArgs, resolved, of a server that has one.
    """
    from sglang.srt.configs.model_config import ModelConfig

    checkpoint = of_drafts(server_args)
    assert checkpoint is not None
    return ModelConfig.from_server_args(
        server_args, model_path=checkpoint.path, model_revision=checkpoint.revision, is_draft_model=True
    )


def draft_facts(server_args: Any) -> dict[str, Any] | None:
    """What decides which rows a draft model's cache has beside a model's, and how many of its drafts are accepted.

    Args:
        server_args: as the worker has them.

    Returns:
        the same of copies, wherever they are; None without a draft model.

    Raises:
        Int2Error: files of weights have changed since they were loaded.
    """
    checkpoint, args = of_drafts(server_args), releases.resolved(server_args)
    if checkpoint is None:
        return None
    draft = config_of(server_args)
    # Not said of the draft model's own type: copies from before there was another stay what they are.
    other = {} if (cache := cache_dtype(args, draft)) == draft.dtype else {"cache": str(cache)}
    return other | {
        "algorithm": algorithm(args),
        "weights": loaded_weights(server_args, checkpoint),
        "load format": args.speculative_draft_load_format,
        "dtype": str(draft.dtype),
        "quantization": args.speculative_draft_model_quantization,
        "configuration": configuration(draft.hf_config),
    }
