"""Tokenizer and configuration of a model; code from its repository runs only where the user allows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from oscar_rotation.errors import first_line
from oscar_rotation.math.rope import context_of, overridden
from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.errors import DataError

OVERRIDES = "--json-model-override-args"


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

    config = _load(AutoConfig, settings)
    return getattr(config, "llm_config", None) or config.get_text_config()


def context_length(config: Any, flags: Sequence[str] = ()) -> int | None:
    """Tokens that a server of a model takes: what its configuration says under the overrides among the flags, or these
    where they say less.

    Args:
        config: of the model.
        flags: of the server.

    Returns:
        None where neither says it.

    Raises:
        DataError: overrides that are not a JSON object.
    """
    change = model_overrides(flags)
    facts = overridden(config.to_dict(), {**change, **change.get("text_config", {})})
    limits = [int(value) for value in _values(flags, "--context-length") if value.isdigit()]
    if facts.get("max_position_embeddings"):
        limits.append(context_of(facts))
    return min((limit for limit in limits if limit), default=None)


def model_overrides(flags: Sequence[str]) -> dict[str, Any]:
    """What the flags of a server change of its model's configuration.

    Raises:
        DataError: ``--json-model-override-args`` is not a JSON object.
    """
    found: dict[str, Any] = {}
    for value in _values(flags, OVERRIDES):
        try:
            found = dict(json.loads(value))
        except (ValueError, TypeError):
            raise DataError(f"{OVERRIDES} {value}: is not a JSON object") from None
    return found


def _values(flags: Sequence[str], name: str) -> Iterator[str]:
    """Values of a flag, in either form."""
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        given, equals, value = flag.partition("=")
        if given == name:
            yield value if equals else following


def _load(kind: Any, settings: ModelSettings) -> Any:
    try:
        return kind.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{settings.model}: comes with code of its own; read it, then allow it with --trust-remote-code"
            ) from None
        raise DataError(f"{settings.model}: {first_line(error)}") from None
