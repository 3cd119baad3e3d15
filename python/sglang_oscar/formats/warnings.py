"""What a server says at its start of rotations that it can serve, but that do less than they could."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oscar_kernels.format import AnyFormat
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity, check_weights
from oscar_rotation.files.reach import reach_warning
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.math.rope import rope_of
from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.content import attention_digest
from sglang_oscar.formats.model_identity import model_identity
from sglang_oscar.formats.sharing import sharing_warning
from sglang_oscar.settings import Settings


def served_identity(args: Any, model: Any) -> ModelIdentity:
    """Which model a server serves, with what its weights hold where their files are here.

    Args:
        args: server arguments as SGLang resolved them.
        model: SGLang's ModelConfig.
    """
    weights = attention_digest(args.model_path, args.revision, args.download_dir)
    return replace(model_identity(args.model_path, model), weights=weights)


def weights_warning(settings: Settings, model: ModelIdentity) -> str | None:
    """What to warn of where it cannot be known whether rotations are of the weights that are served.

    Args:
        settings: where the rotations come from; their files have been loaded before.
        model: that is served.

    Raises:
        Int2Error: they are of other weights, and SGLANG_OSCAR_ALLOW_OTHER_MODEL is not set.
    """
    if settings.allow_other_model:
        return None
    said = None
    try:
        for source in (settings.v_rotation, settings.k_rotation):
            if source is not None and source not in BUILT_IN:
                said = check_weights(read_rotation_file(source).metadata, source, model) or said
    except RotationFileError as error:
        raise Int2Error(str(error)) from None
    return said


def rotation_warnings(
    settings: Settings, model: Any, identity: ModelIdentity, formats: Mapping[int, AnyFormat]
) -> list[str]:
    """Warnings, one line each, in the order of what they cost.

    Args:
        settings: where the rotations come from; their files have been loaded before.
        model: SGLang's ModelConfig, under the server's overrides and context length.
        identity: of the model.
        formats: of all layers, with all kv heads of the model.

    Raises:
        Int2Error: as :func:`weights_warning`.
    """
    found = [weights_warning(settings, identity), sharing_warning(settings, formats)]
    source = settings.k_rotation  # values do not turn with the position
    if source is not None and source not in BUILT_IN:
        rope = rope_of(model.hf_text_config.to_dict(), model.head_dim)
        found.insert(1, reach_warning(source, read_rotation_file(source).metadata, model.context_len, rope))
    return [said for said in found if said is not None]
