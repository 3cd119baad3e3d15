"""The paper's ablations as lists of variants, each a method of its own with its own fit where it needs one; all are of
the published recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oscar_rotation.files.pair import rotation_files
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipes import PUBLISHED
from oscar_tools.calibration.dump_driver import DumpTask, run_dump
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.rotation_driver import run_fit
from oscar_tools.evaluation.methods import K_CLIP, V_CLIP, Method, make_method
from sglang_oscar.settings import variable

SINK, RECENT, WINDOW_SWITCH = variable("sink_tokens"), variable("recent_tokens"), variable("windows_enabled")


@dataclass(frozen=True)
class Variant:
    """One row of an ablation.

    Attributes:
        name: in folder names.
        title: in tables.
        env: variables of the server on top of OSCAR's.
        fit: options of a fit of its own; None uses the calibration's rotations.
        recipe: "identity" or "hadamard" instead of a fit.
        calibration: data set and tokens of a dump of its own.
        group_size: instead of the model's.
    """

    name: str
    title: str
    env: dict[str, str] = field(default_factory=dict)
    fit: dict[str, Any] | None = None
    recipe: str | None = None
    calibration: tuple[str, int] | None = None
    group_size: int | None = None


def windows() -> list[Variant]:
    """Sink and recent window sizes (table 5)."""
    sizes = ((0, 0), (32, 128), (64, 256), (128, 512), (256, 1024))
    return [
        Variant(
            f"windows_{sink}_{recent}",
            f"(S, R) = ({sink}, {recent})",
            {WINDOW_SWITCH: "1" if sink or recent else "0"}
            | ({SINK: str(sink), RECENT: str(recent)} if sink or recent else {}),
        )
        for sink, recent in sizes
    ]


def clip() -> list[Variant]:
    """Clip ratios of keys and values (table 6), and ratios fitted per layer."""
    ratios = ("0.88", "0.92", "0.96", "0.98", "1.00")
    grid = [Variant(f"clip_{k}_{v}", f"c_K = {k}, c_V = {v}", {K_CLIP: k, V_CLIP: v}) for k in ratios for v in ratios]
    return [*grid, Variant("clip_fitted", "fitted per layer", {K_CLIP: "", V_CLIP: ""}, fit={"fit_clip": True})]


def calibration() -> list[Variant]:
    """Calibration data and their volume (table 7)."""
    regimes = [("MMLU", n) for n in (2000, 8000, 16000, 32000)] + [("WikiText", 8000), ("GPQA", 8000)]
    return [
        Variant(f"calibration_{name}_{n}", f"{name}, {n // 1000}k tokens", calibration=(name, n)) for name, n in regimes
    ]


def rotation() -> list[Variant]:
    """Factors of the rotation and other targets (table 4)."""
    return [
        Variant("rotation_full", "full OSCAR: U H P", fit={}),
        Variant("rotation_ktk_vtv", "K^T K / V^T V target", fit={"key_target": "ktk", "value_target": "vtv"}),
        Variant("rotation_r_h", "w/o P", fit={"composition": "r_h"}),
        Variant("rotation_pbr", "w/o H", fit={"composition": "pbr"}),
        Variant("rotation_h_pbr", "w/o U", fit={"composition": "h_pbr"}),
        Variant("rotation_hadamard", "Hadamard", recipe="hadamard"),
        Variant("rotation_none", "no rotation", recipe="identity"),
        Variant("rotation_descending", "eigenvectors descending", fit={"order": "descending"}),
        Variant("rotation_proxy", "proxy value target", fit={"value_target": "proxy"}),
        Variant("rotation_uresidual", "residual target", fit={"key_target": "uresidual", "value_target": "uresidual"}),
    ]


def group_size() -> list[Variant]:
    """Channels per quantization group."""
    return [Variant(f"group_{size}", f"group size {size}", group_size=size) for size in (128, 64, 32)]


ABLATIONS: dict[str, Callable[[], list[Variant]]] = {
    "windows": windows,
    "clip": clip,
    "calibration": calibration,
    "rotation": rotation,
    "group-size": group_size,
}
"""Ablation -> its variants."""


def variant_method(variant: Variant, settings: ModelSettings, base: CalibrationFolder, dump: DumpTask) -> Method:
    """The method of a variant; dumps and fits what it needs and is not there yet.

    Args:
        variant: the row.
        settings: of the model.
        base: calibration whose dump and rotations are used unless the variant has its own.
        dump: how a dump is made, for variants with a calibration of their own.

    Raises:
        DataError, DumpError, RotationFileError: as the drivers.
    """
    chosen = settings.overridden(group_size=variant.group_size)
    folder, rotations = base, base.rotations(PUBLISHED)
    if variant.calibration is not None:
        dataset, tokens = variant.calibration
        folder = run_dump(replace(dump, dataset=dataset, tokens=tokens))
        rotations = folder.rotations(PUBLISHED)
    if variant.fit is not None:
        rotations = base.path / "ablations" / variant.name
    # A variant's own fit is made anew where the dump is newer; the calibration's is the user's to make.
    stale = variant.fit is not None and _is_older(rotations, folder.dump)
    if variant.recipe is None and (stale or not _has_files(rotations)):
        run_fit(folder, PUBLISHED, FitOptions(**{"group_size": chosen.group_size} | (variant.fit or {})), out=rotations)
    method = make_method(variant.recipe or "oscar", chosen, rotations)
    # An empty value means: leave the variable unset.
    env = {name: value for name, value in (method.env | variant.env).items() if value}
    return replace(method, name=variant.name, title=variant.title, env=env)


def _is_older(folder: Path, dump: Path) -> bool:
    """Whether files of a fit were there before the dump."""
    written = [path.stat().st_mtime for path in folder.glob("[kv]_rotation_*")]
    return bool(written) and min(written) < dump.stat().st_mtime


def _has_files(folder: Path) -> bool:
    try:
        rotation_files(folder)
    except ValueError:
        return False
    return True
