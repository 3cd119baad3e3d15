"""Where keys of a model may stand, from its configuration: what a fit for a long context needs to know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oscar_rotation.errors import DumpError
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rope import context_of, overridden, rope_of, text_config, turning


def rotary_positions(
    model: Path, head_dim: int, context: int | None, overrides: Mapping[str, Any] | None = None
) -> Positions | None:
    """Where keys of a model may stand.

    Args:
        model: folder with config.json.
        head_dim: channels per head.
        context: positions; None for the model's own context.
        overrides: of the configuration, as SGLang's ``--json-model-override-args``.

    Returns:
        None if the configuration is missing or its kind of embedding is not known here.

    Raises:
        DumpError: config.json cannot be read.
    """
    path = model / "config.json"
    if not path.is_file():
        return None
    try:
        config = text_config(overridden(json.loads(path.read_text(encoding="utf-8")), overrides or {}))
        rope = rope_of(config, head_dim)
        return None if rope is None else Positions(turning(rope)[0], context or context_of(config), rope)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(
            f"{path}: its rotary embedding cannot be read ({error}); `oscar fit --context 0` does without"
        ) from error
