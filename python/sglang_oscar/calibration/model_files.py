"""Tokenizer and configuration of a model; code from its repository runs only where the user allows it."""

from __future__ import annotations

from typing import Any

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


def _load(kind: Any, settings: ModelSettings) -> Any:
    try:
        return kind.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{settings.model}: comes with code of its own; read it, then allow it with --trust-remote-code"
            ) from None
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{settings.model}: {first[0]}") from None
