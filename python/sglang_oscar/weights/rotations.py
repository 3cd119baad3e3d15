"""Rotations and clip ratios of a server, from files or built-in recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.identity import ModelIdentity
from oscar_rotation.files.rotation_file import load_rotation
from sglang_oscar.errors import Int2Error
from sglang_oscar.settings import DEFAULT_K_CLIP, DEFAULT_V_CLIP, Settings
from sglang_oscar.weights.model_identity import model_identity

IDENTITY = "identity"


@dataclass(frozen=True)
class Side:
    """Rotation of keys or of values.

    ``rotation`` is float32 [layers, head_dim, head_dim], or None for the identity, which costs nothing;
    ``clip_ratios`` has one ratio per layer. Of the recipe ``plus``: ``dual`` is float32 like ``rotation``, what reads
    the rotated vectors is multiplied by it (None: by ``rotation``); ``centers`` float32 [layers, kv_heads of the
    model, head_dim] is subtracted from rotated keys (None: nothing); ``gains`` has one per layer, of scales fitted to
    the codes (:func:`oscar_kernels.codec.fitted_parameters`), 0 for the scales of the range.
    """

    source: str
    rotation: torch.Tensor | None
    clip_ratios: list[float]
    dual: torch.Tensor | None = None
    centers: torch.Tensor | None = None
    gains: tuple[float, ...] = ()

    @property
    def reading(self) -> torch.Tensor | None:
        """What reads the rotated vectors is multiplied by it: the rotation itself where it is orthogonal."""
        return self.rotation if self.dual is None else self.dual


@dataclass(frozen=True)
class Rotations:
    """Rotations of a model, keys and values."""

    key: Side
    value: Side


def load_rotations(settings: Settings, num_layers: int, head_dim: int, model: ModelIdentity | None = None) -> Rotations:
    """Load and check both rotations.

    Args:
        settings: where they are and which clip ratios override theirs.
        num_layers, head_dim: what the model has.
        model: the model to be served; what SGLang has published in this process where None.

    Raises:
        Int2Error: a variable is unset or a file is missing, broken, made for another model or of another recipe.
    """
    model = None if settings.allow_other_model else model or served_model()

    def load(side: Literal["k", "v"], source: str | None, override: float | None, default: float) -> Side:
        return _load(side, source, override, default, num_layers, head_dim, model, settings.recipe)

    return Rotations(
        key=load("k", settings.k_rotation, settings.k_clip_ratio, DEFAULT_K_CLIP),
        value=load("v", settings.v_rotation, settings.v_clip_ratio, DEFAULT_V_CLIP),
    )


def served_model() -> ModelIdentity | None:
    """The model of this process; None before SGLang has published its arguments."""
    from sglang.srt.runtime_context import get_server_args

    try:
        args = get_server_args()
        return model_identity(args.model_path, args.get_model_config())
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError):
        return None


def _load(
    side: Literal["k", "v"],
    source: str | None,
    override: float | None,
    default: float,
    layers: int,
    head_dim: int,
    model: ModelIdentity | None,
    recipe: str,
) -> Side:
    variable = f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"
    if source is None:
        raise Int2Error(
            f"{variable} is not set: give a rotation file (fit one with `oscar fit`), or the built-in recipe "
            "`hadamard` or `identity`"
        )
    try:
        found = load_rotation(source, num_layers=layers, head_dim=head_dim, side=side, model=model)
    except RotationFileError as error:
        raise Int2Error(f"{variable}: {error}") from None
    if found.recipe != recipe:
        remedy = (
            "set SGLANG_OSCAR_RECIPE=plus"
            if found.recipe == "plus"
            else "fit one with `oscar fit --recipe plus`, or set SGLANG_OSCAR_RECIPE=paper"
        )
        raise Int2Error(
            f"{variable}: {source} is of the recipe {found.recipe}, SGLANG_OSCAR_RECIPE is {recipe}; {remedy}"
        )
    if found.centers is not None and model and model.kv_heads and found.centers.shape[1] != model.kv_heads:
        raise Int2Error(
            f"{variable}: {source} has centers of {found.centers.shape[1]} kv heads, the model has {model.kv_heads}; "
            "use this model's file"
        )
    if found.centers is not None and side == "v":
        raise Int2Error(f"{variable}: {source} centers values, which is not served; use this model's value file")
    stored = found.clip_ratios or (default,) * layers
    clips = list(stored) if override is None else [override] * layers
    rotation = None if source == IDENTITY else found.rotations
    return Side(source, rotation, clips, found.duals, found.centers, found.gains or (0.0,) * layers)
