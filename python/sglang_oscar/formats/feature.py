"""What rows are: rotation files are read, and refused, before a model is."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.feature import Feature
from sglang_oscar.formats.rotations import model_formats
from sglang_oscar.formats.warnings import served_identity, weights_warning
from sglang_oscar.settings import Settings


def settle(server_args: Any, settings: Settings, model: Any, note: None) -> Settings:
    """Load the rotations once, so that a broken file stops the launch right here.

    Args:
        server_args: SGLang's ServerArgs.
        settings: of int2 mode, with both rotations.
        model: SGLang's ModelConfig.
        note: nothing.

    Raises:
        Int2Error: naming the file at fault.
    """
    args = releases.resolved(server_args)
    model_formats(args, settings, model)
    weights_warning(settings, served_identity(args, model))  # told where pools are built, once
    return settings


FEATURE = Feature(name="formats", settle=settle)
