"""Rotations and clip ratios of a server, from files or built-in recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files import load_rotation
from oscar_rotation.rotation_set import RotationSet

from sglang_oscar.errors import Int2Error
from sglang_oscar.settings import DEFAULT_K_CLIP, DEFAULT_V_CLIP, Settings

IDENTITY = "identity"


@dataclass(frozen=True)
class Side:
    """Rotation of keys or of values.

    ``rotation`` is float32 [layers, head_dim, head_dim], or None for the identity, which costs nothing;
    ``clip_ratios`` has one ratio per layer.
    """

    source: str
    rotation: torch.Tensor | None
    clip_ratios: list[float]


@dataclass(frozen=True)
class Rotations:
    """Rotations of a model, keys and values."""

    key: Side
    value: Side


def load_rotations(settings: Settings, num_layers: int, head_dim: int) -> Rotations:
    """Load and check both rotations.

    Args:
        settings: where they are and which clip ratios override theirs.
        num_layers, head_dim: what the model has.

    Raises:
        Int2Error: a variable is unset or a file is missing, broken or made for another model.
    """
    sides = {
        "k": ("SGLANG_OSCAR_K_ROTATION_PATH", settings.k_rotation, settings.k_clip_ratio, DEFAULT_K_CLIP),
        "v": ("SGLANG_OSCAR_V_ROTATION_PATH", settings.v_rotation, settings.v_clip_ratio, DEFAULT_V_CLIP),
    }
    loaded = {}
    for side, (variable, source, override, default) in sides.items():
        if source is None:
            raise Int2Error(
                f"{variable} is not set: give a rotation file (fit one with `oscar fit`), or the built-in recipe "
                "`hadamard` or `identity`"
            )
        try:
            found = load_rotation(source, num_layers=num_layers, head_dim=head_dim, side=side)
        except RotationFileError as error:
            raise Int2Error(f"{variable}: {error}") from None
        loaded[side] = _resolve(source, found, override, default, num_layers)
    return Rotations(key=loaded["k"], value=loaded["v"])


def _resolve(source: str, found: RotationSet, override: float | None, default: float, layers: int) -> Side:
    clips = found.clip_ratios
    if override is not None:
        clips = [override] * layers
    elif clips is None:
        clips = [default] * layers
    return Side(source, None if source == IDENTITY else found.rotations, list(clips))
