"""Rotations and clip ratios of a server, from files or built-in recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files import load_rotation
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
    return Rotations(
        key=_load("k", settings.k_rotation, settings.k_clip_ratio, DEFAULT_K_CLIP, num_layers, head_dim),
        value=_load("v", settings.v_rotation, settings.v_clip_ratio, DEFAULT_V_CLIP, num_layers, head_dim),
    )


def _load(
    side: Literal["k", "v"], source: str | None, override: float | None, default: float, layers: int, head_dim: int
) -> Side:
    variable = f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"
    if source is None:
        raise Int2Error(
            f"{variable} is not set: give a rotation file (fit one with `oscar fit`), or the built-in recipe "
            "`hadamard` or `identity`"
        )
    try:
        found = load_rotation(source, num_layers=layers, head_dim=head_dim, side=side)
    except RotationFileError as error:
        raise Int2Error(f"{variable}: {error}") from None
    stored = found.clip_ratios or (default,) * layers
    clips = list(stored) if override is None else [override] * layers
    return Side(source, None if source == IDENTITY else found.rotations, clips)
