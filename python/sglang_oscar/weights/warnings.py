"""What a server says at its start of rotations that it can serve, but that do less than they could."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oscar_kernels.format import LayerFormat
from oscar_rotation.files.reach import reach_warning
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.math.rope import rope_of
from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.settings import Settings
from sglang_oscar.weights.sharing import sharing_warning


def rotation_warnings(settings: Settings, model: Any, formats: Mapping[int, LayerFormat]) -> Iterator[str]:
    """Warnings, one line each, in the order of what they cost.

    Args:
        settings: where the rotations come from; their files have been loaded before.
        model: SGLang's ModelConfig, under the server's overrides and context length.
        formats: of all layers, with all kv heads of the model.
    """
    source = settings.k_rotation  # values do not turn with the position
    if source is not None and source not in BUILT_IN:
        rope = rope_of(model.hf_text_config.to_dict(), model.head_dim)
        if said := reach_warning(source, read_rotation_file(source).metadata, model.context_len, rope):
            yield said
    if said := sharing_warning(settings, formats):
        yield said
