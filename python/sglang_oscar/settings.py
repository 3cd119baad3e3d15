"""Every knob of int2 mode that is an environment variable, typed and validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from oscar_kernels.cache import Windows
from oscar_kernels.layout import SCALE_DTYPES
from oscar_rotation.files.rotation_set import DEFAULT_CLIP_RATIOS
from oscar_rotation.recipes import FITTED
from sglang_oscar.errors import Int2Error, malformed

PREFIXES = ("SGLANG_OSCAR_", "SGLANG_MIXED_KV_", "SGLANG_ENABLE_MIXED_KV_")
DEFAULT_K_CLIP, DEFAULT_V_CLIP = DEFAULT_CLIP_RATIOS["k"], DEFAULT_CLIP_RATIOS["v"]
Bits = Annotated[Literal[2, 3, 4, 16], BeforeValidator(lambda text: int(text) if str(text).isdigit() else text)]
KeyCoding = Literal["affine", "codebook"]
ValueCoding = Literal["affine", "symmetric"]
FloatName = Literal["bfloat16", "float16", "float32"]


UNSET = {
    "rotations": "(where servers look)",
    "k_rotation": "(see SGLANG_OSCAR_ROTATIONS)",
    "v_rotation": "(see SGLANG_OSCAR_ROTATIONS)",
    "cache": "~/.cache/sglang-oscar",
    "recipe": "(from the rotation files)",
    "k_bits": "(from the rotation file, else 2)",
    "v_bits": "(from the rotation file, else 2)",
    "k_coding": "(from the rotation file, else affine)",
    "v_coding": "(from the rotation file, else affine)",
    "k_clip_ratio": f"(from the rotation file, else {DEFAULT_K_CLIP})",
    "v_clip_ratio": f"(from the rotation file, else {DEFAULT_V_CLIP})",
}
"""What applies in the place of a setting that is None."""


THE_CACHE, ON_THE_SPOT = CACHED = ("the cache", "calibration on the spot")
"""What is said of where rotations are from."""

WITHOUT_EFFECT = {
    "SGLANG_OSCAR_ABSORB_V_ROTATION": "values are rotated at every step, and weights stay as they were loaded",
}
"""Variables of the published release's command line that change nothing here, and why."""


class Settings(BaseModel):
    """Settings of int2 mode; field aliases are the environment variables, descriptions are for docs/reference.md.

    ``recipe`` stays None where the variable is unset: then the rotation files say it. So do ``k_bits`` and ``v_bits``,
    bits of a code or 16 for none, and ``k_coding`` and ``v_coding``, which are for calibrations and built-in recipes:
    those have affine codes of 2 bits unless told otherwise. ``k_clip_ratio``
    and ``v_clip_ratio`` stay None too: then the ratios stored in the rotation file apply, and after them the defaults
    0.96 and 0.92 (paper, section 5.1).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=False)
    _origin: str = PrivateAttr("")

    rotations: str | None = Field(
        None,
        alias="SGLANG_OSCAR_ROTATIONS",
        min_length=1,
        description="folder of both rotation files, or a repository of the hub (`owner/name`, `owner/name/folder`), or "
        "`hadamard` (QuaRot), or `identity` (plain INT2)",
    )
    k_rotation: str | None = Field(
        None,
        alias="SGLANG_OSCAR_K_ROTATION_PATH",
        min_length=1,
        description="instead: the rotation file for keys, or `hadamard`, or `identity`",
    )
    v_rotation: str | None = Field(
        None, alias="SGLANG_OSCAR_V_ROTATION_PATH", min_length=1, description="the same for values"
    )
    calibrate: bool = Field(
        True,
        alias="SGLANG_OSCAR_CALIBRATE",
        description="0 refuses a model without rotations instead of calibrating it before the server starts",
    )
    calibrate_seconds: float = Field(
        3600,
        alias="SGLANG_OSCAR_CALIBRATE_SECONDS",
        gt=0,
        allow_inf_nan=False,
        description="how long that may take, and how long a server waits for another that does the same",
    )
    cache: str | None = Field(
        None,
        alias="SGLANG_OSCAR_CACHE",
        min_length=1,
        description="folder of calibrations; of several machines it may be a shared one",
    )
    recipe: str | None = Field(
        None,
        alias="SGLANG_OSCAR_RECIPE",
        description=f"calibrate with this recipe, and refuse files of another: {', '.join(FITTED)}",
    )
    k_clip_ratio: float | None = Field(
        None,
        alias="SGLANG_OSCAR_K_CLIP_RATIO",
        gt=0,
        le=1,
        description="clip keys at this order statistic of their magnitudes; 1 does not clip",
    )
    v_clip_ratio: float | None = Field(
        None, alias="SGLANG_OSCAR_V_CLIP_RATIO", gt=0, le=1, description="the same for values"
    )
    k_bits: Bits | None = Field(
        None,
        alias="SGLANG_OSCAR_K_BITS",
        description="bits of a code of keys, for calibration on the spot, `hadamard`, `identity`; 16 keeps keys exact",
    )
    v_bits: Bits | None = Field(None, alias="SGLANG_OSCAR_V_BITS", description="the same for values")
    k_coding: KeyCoding | None = Field(
        None, alias="SGLANG_OSCAR_K_CODING", description="codes of 2-bit keys, for calibration on the spot"
    )
    v_coding: ValueCoding | None = Field(None, alias="SGLANG_OSCAR_V_CODING", description="the same for values")
    allow_other_model: bool = Field(
        False, alias="SGLANG_OSCAR_ALLOW_OTHER_MODEL", description="accept a file that was fitted for another model"
    )
    allow_newer: bool = Field(
        False,
        alias="SGLANG_OSCAR_ALLOW_NEWER",
        description="serve on a release of SGLang newer than what was tested, where every touch point reads back",
    )
    allow_untried: bool = Field(
        False,
        alias="SGLANG_OSCAR_ALLOW_UNTRIED",
        description="serve a class of models that was not tried",
    )
    key_errors: bool = Field(False, alias="SGLANG_OSCAR_KEY_ERRORS", description="measure errors of keys on traffic")
    recompute_recent: bool = Field(
        True,
        alias="SGLANG_OSCAR_RECOMPUTE_RECENT",
        description="on a prefix hit compute the newest tokens of the prompt again, so that the recent window is exact",
    )
    kept_windows: int = Field(
        0,
        alias="SGLANG_OSCAR_KEPT_WINDOWS",
        ge=0,
        le=65536,
        description="recent windows kept for prefix hits, which then compute nothing again",
    )
    decode_backend: Literal["auto", "cuda", "triton"] = Field(
        "auto",
        alias="SGLANG_OSCAR_DECODE_BACKEND",
        description="attention of generated tokens on a GPU; `auto` takes CUDA on Hopper, else Triton",
    )
    extend_backend: Literal["auto", "flashinfer", "fa3", "fa4", "triton"] = Field(
        "auto",
        alias="SGLANG_OSCAR_EXTEND_BACKEND",
        description="attention of prompts on a GPU; `auto` takes FlashAttention-4 on Blackwell, else FlashAttention-3; "
        "where there is none, FlashInfer, Triton",
    )
    windows_enabled: bool = Field(
        True, alias="SGLANG_ENABLE_MIXED_KV_WINDOWS", description="16-bit windows; 0 reads everything quantized"
    )
    sink_tokens: int = Field(
        64,
        alias="SGLANG_MIXED_KV_PREFIX_TOKENS",
        ge=0,
        le=4096,
        description="sink: first tokens of a request that are read in 16 bits; 0 or a power of two",
    )
    recent_tokens: int = Field(
        256,
        alias="SGLANG_MIXED_KV_RECENT_TOKENS",
        ge=0,
        le=8192,
        description="recent window: newest tokens of a request that are read in 16 bits",
    )
    window_max_splits: int = Field(
        8,
        alias="SGLANG_MIXED_KV_HP_MAX_SPLITS",
        ge=1,
        le=64,
        description="thread blocks that read the windows of a request, Triton kernel only; large windows want more",
    )
    window_dtype: Literal["bfloat16", "float16"] = Field(
        "bfloat16", alias="SGLANG_MIXED_KV_HP_DTYPE", description="dtype of the windows"
    )
    scale_dtype: FloatName = Field(
        "bfloat16", alias="SGLANG_MIXED_KV_SCALE_DTYPE", description="dtype of scales and zero points"
    )

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, name: str | None) -> str | None:
        if name is not None and name not in FITTED:
            raise ValueError(f"must be {' or '.join(FITTED)}")
        return name

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the settings.

        Args:
            env: environment; the process's own by default.

        Raises:
            Int2Error: a value is out of range or malformed, or a variable of ours has an unknown name.
        """
        env = os.environ if env is None else env
        known = {field.alias for field in cls.model_fields.values()}
        values = {k: value for k, value in env.items() if k.startswith(PREFIXES) and k not in WITHOUT_EFFECT}
        unknown = sorted(set(values) - known)
        if unknown:
            raise Int2Error(f"{unknown[0]} is not a setting; known are {', '.join(sorted(filter(None, known)))}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise malformed(error, values) from None

    def with_rotations(self, keys: str, values: str, origin: str = "") -> Settings:
        """The same with these rotations: paths, or names of built-in recipes.

        Args:
            keys, values: the rotations.
            origin: where they come from, in words.
        """
        found = self.model_copy(update={"k_rotation": keys, "v_rotation": values})
        found._origin = origin
        return found

    def named(self, side: str) -> str:
        """How messages name the rotations of a side, "k" or "v": by its variable, or by where they are from."""
        variable = f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH"
        return variable if not self._origin or variable in self._origin else f"rotations from {self._origin}"

    @property
    def is_cached(self) -> bool:
        """Whether the rotations are in the user's cache, which can make them anew."""
        return self._origin in CACHED

    @property
    def windows(self) -> Windows:
        """Window sizes in tokens; all 0 with SGLANG_ENABLE_MIXED_KV_WINDOWS=0."""
        if not self.windows_enabled:
            return Windows(sink=0, recent=0, ring=0)
        sink, recent = self.sink_tokens, self.recent_tokens
        return Windows(sink=sink, recent=recent, ring=recent, max_splits=self.window_max_splits)

    @property
    def scale_torch_dtype(self) -> torch.dtype:
        """dtype of scale and zero point."""
        return SCALE_DTYPES[self.scale_dtype]

    @property
    def window_torch_dtype(self) -> torch.dtype:
        """dtype of sink store and recent ring."""
        return SCALE_DTYPES[self.window_dtype]

    def lines(self) -> list[str]:
        """One ``VARIABLE=value`` per setting, for the start-up log."""
        shown = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            value = UNSET.get(name) if value is None else value
            shown.append(f"{field.alias}={int(value) if isinstance(value, bool) else value}")
        return shown


def variable(field: str) -> str:
    """The environment variable of a setting.

    >>> variable("sink_tokens")
    'SGLANG_MIXED_KV_PREFIX_TOKENS'
    """
    return str(Settings.model_fields[field].alias)
