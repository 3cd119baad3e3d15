"""Tokenizer and configuration of a model; code from its repository runs only where the user allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_rotation.errors import first_line
from oscar_rotation.model_table import ModelSettings
from sglang_oscar.calibration.errors import DataError


def load_tokenizer(settings: ModelSettings) -> Any:
    """The tokenizer of a model.

    Raises:
        DataError: it cannot be had, or not without code from the model's repository.
    """
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, settings)


def load_config(settings: ModelSettings) -> Any:
    """The configuration of a model; of one that also reads images, that of its text model.

    Raises:
        DataError: as :func:`load_tokenizer`.
    """
    from transformers import AutoConfig

    return _load(AutoConfig, settings).get_text_config()


def context_length(config: Any, flags: Sequence[str] = ()) -> int | None:
    """Tokens that a server of a model takes: what its configuration says, or its flags where they say less.

    Args:
        config: of the model.
        flags: of the server.

    Returns:
        None where neither says it.
    """
    limits = [int(getattr(config, "max_position_embeddings", None) or 0)]
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, _, value = flag.partition("=")
        if name == "--context-length" and (value or following).isdigit():
            limits.append(int(value or following))
    return min((limit for limit in limits if limit), default=None)


def _load(kind: Any, settings: ModelSettings) -> Any:
    try:
        return kind.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{settings.model}: comes with code of its own; read it, then allow it with --trust-remote-code"
            ) from None
        raise DataError(f"{settings.model}: {first_line(error)}") from None
