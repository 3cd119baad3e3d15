"""What is compared: how the server of each method is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_kernels.layout import RowLayout
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipes import FITTED, PUBLISHED
from oscar_tools.calibration.dump_driver import plain_backend
from oscar_tools.calibration.weight_files import file_digest
from oscar_tools.evaluation.server_facts import ServerFacts
from sglang_oscar.formats.cached_layers import cached_layers_of_files
from sglang_oscar.formats.rotations import load_formats
from sglang_oscar.settings import Settings, variable

K_PATH, V_PATH, RECIPE = variable("k_rotation"), variable("v_rotation"), variable("recipe")
K_CLIP, V_CLIP = variable("k_clip_ratio"), variable("v_clip_ratio")
BARE = {variable("windows_enabled"): "0", K_CLIP: "1", V_CLIP: "1"}
"""No windows and no clipping: the paper's baselines at 2.25 bits."""

RECIPE_OF = {"oscar": PUBLISHED} | {name: name for name in FITTED if name != PUBLISHED}
"""Method with fitted rotations -> their recipe. "oscar" is the published one."""

TITLES = {
    "bf16": "BF16",
    "oscar": "OSCAR",
    **{name: f"INT2, recipe {name}" for name in RECIPE_OF if name != "oscar"},
    "hadamard": "Hadamard, windows and clip",
    "identity": "no rotation, windows and clip",
    "quarot": "QuaRot-INT2",
    "naive": "Naive INT2",
}
"""Method -> name in tables. "hadamard" and "identity" differ from OSCAR in the rotation only."""


@dataclass(frozen=True)
class Method:
    """How to start a server.

    Attributes:
        name: in folder names.
        title: in tables.
        group_size: of the 2-bit cache; None serves in 16 bits.
        env: variables of the server.
    """

    name: str
    title: str
    group_size: int | None = None
    env: dict[str, str] = field(default_factory=dict)

    def server_args(self, settings: ModelSettings, extra: tuple[str, ...] = ()) -> list[str]:
        """Flags of the server for a model."""
        args = ["--tensor-parallel-size", str(settings.tp_eval), *settings.server_flags]
        if settings.reasoning_parser:
            args += ["--reasoning-parser", settings.reasoning_parser]
        if self.group_size is None:
            return [*args, *plain_backend(extra), *extra]
        return [*args, "--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(self.group_size), *extra]

    def check(self, config: Any) -> None:
        """Find out before a server starts whether it would take the rotation files.

        Args:
            config: the model's configuration: num_key_value_heads, head_dim, and what
                :func:`cached_layers_of_files` reads.

        Raises:
            Int2Error: it would not.
        """
        if self.group_size is None:
            return
        settings = Settings.from_env(self.env)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys, values = (
            RowLayout(config.num_key_value_heads, channels, self.group_size, settings.scale_torch_dtype)
            for channels in (head_dim, getattr(config, "v_head_dim", None) or head_dim)
        )
        load_formats(settings, keys, cached_layers_of_files(config), value_layout=values)


def contents(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server with the SHA-256 of files instead of their paths: what its answers depend on.

    Raises:
        OSError: a file cannot be read.
    """
    return {name: file_digest(Path(x)) if Path(x).is_file() else x for name, x in sorted(env.items())}


def make_method(
    name: str, settings: ModelSettings, rotations: Path | None = None, *, file_clips: bool = False
) -> Method:
    """A method by name.

    Args:
        name: one of :data:`TITLES`.
        settings: of the model; its clip ratios apply to every method with clipping, but for those whose recipe
            brings its own.
        rotations: folder of rotation files, for a method of :data:`RECIPE_OF`.
        file_clips: let "oscar" use the clip ratios in its files instead of the table's.

    Raises:
        ValueError: an unknown name, or a method of fitted rotations without any.
        RotationFileError: the folder does not hold one file per side.
    """
    if name not in TITLES:
        raise ValueError(f"method must be one of {', '.join(TITLES)}, got {name!r}")
    if name == "bf16":
        return Method(name, TITLES[name])
    built_in = {"hadamard": "hadamard", "quarot": "hadamard", "identity": "identity", "naive": "identity"}
    if name in RECIPE_OF:
        if rotations is None:
            raise ValueError(f"method {name} needs rotations: set ROT_DIR or fit some")
        env = files_of(rotations) | {RECIPE: RECIPE_OF[name]}
    else:
        env = {K_PATH: built_in[name], V_PATH: built_in[name]}
    if name in ("quarot", "naive"):
        env |= BARE
    elif name not in RECIPE_OF or (name == "oscar" and not file_clips):
        env |= {K_CLIP: str(settings.clip.k), V_CLIP: str(settings.clip.v)}
    return Method(name, TITLES[name], settings.group_size, env)


def files_of(folder: Path) -> dict[str, str]:
    """Variables of a server that name the rotation files of a folder.

    Raises:
        RotationFileError: it does not hold one file per side.
    """
    k, v = (str(path.resolve()) for path in rotation_files(folder))
    return {K_PATH: k, V_PATH: v}


def running_method(facts: ServerFacts, asked: Sequence[str] = ()) -> Method:
    """The method of a server that runs already: what it says of itself.

    Args:
        facts: of the server.
        asked: names that the user gave.

    Raises:
        ValueError: the user named something else.
    """
    if facts.int2 is None:
        name = "bf16" if facts.title == TITLES["bf16"] else facts.dtype
        made = Method(name, facts.title)
    else:
        recipe = facts.int2["recipe"]
        name = next((method for method, fitted in RECIPE_OF.items() if fitted == recipe), recipe)
        made = Method(name, facts.title, next(iter(facts.int2["group_sizes"]), None))
    if set(asked) - {name}:
        raise ValueError(f"--methods {','.join(asked)}: the running server is {name} ({facts.title}); drop --methods")
    return made
