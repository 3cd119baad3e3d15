"""The model that drafts: SGLang's configuration of it, and what makes its rows those of no other."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import algorithm
from sglang_oscar.formats.model_identity import configuration
from sglang_oscar.formats.origin import loaded_weights, of_drafts


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
    return {
        "algorithm": algorithm(args),
        "weights": loaded_weights(server_args, checkpoint),
        "load format": args.speculative_draft_load_format,
        "dtype": str(draft.dtype),
        "quantization": args.speculative_draft_model_quantization,
        "configuration": configuration(draft.hf_config),
    }
