"""What a fit gives, and the files it becomes."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oscar_rotation.files.identity import WEIGHTS
from oscar_rotation.files.rotation_file import rotation_file_name, save_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.math.positions import Positions

FEW_TOKENS_PER_CHANNEL = 8
"""Below this many tokens per channel a covariance is too noisy to trust its small eigenvalues."""


@dataclass(frozen=True)
class FitResult:
    """Rotations of both sides, remarks on the calibration data, and the report, empty where none was asked for."""

    key: RotationSet
    value: RotationSet
    remarks: tuple[str, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What was fitted to what, in a line."""
        facts = self.key.metadata.calibration
        reaches = f", for {facts['context']:,} positions" if "context" in facts else ""
        return (
            f"fitted {self.key.num_layers} layers on {facts['tokens']} tokens of {facts['requests']} requests{reaches}"
        )

    def of_model(self, weights: str, layer_ids: tuple[int, ...] | None) -> FitResult:
        """The same, with files that state which weights they are of, and files and report which layers.

        Args:
            weights: :attr:`oscar_rotation.files.identity.ModelIdentity.weights`; empty where it is not known.
            layer_ids: None where they are all.
        """
        key, value = (_of_model(side, weights, layer_ids) for side in (self.key, self.value))
        report = dict(self.report)
        if report and layer_ids is not None:
            report["layers"] = [layer | {"layer": layer_ids[layer["layer"]]} for layer in report["layers"]]
        return replace(self, key=key, value=value, report=report)

    def usual_formats(self, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        """The first of a recipe's file formats that can hold this: a .pt file has all layers of a model."""
        return suffixes[:1] if self.key.layer_ids is None else (".safetensors",)

    def save(self, out: Path, suffixes: tuple[str, ...]) -> list[Path]:
        """Write both rotation files under their usual names, in each format of ``suffixes``, and return their paths.

        Raises:
            RotationFileError: a format that does not hold them.
            OSError: a file cannot be written.
        """
        paths = []
        for side, rotations in (("k", self.key), ("v", self.value)):
            for suffix in suffixes:
                facts = rotations.metadata
                path = out / rotation_file_name(side, facts.objective, facts.composition, suffix)  # type: ignore[arg-type]
                save_rotation_file(path, rotations)
                paths.append(path)
        return paths


def _of_model(side: RotationSet, weights: str, layer_ids: tuple[int, ...] | None) -> RotationSet:
    facts = side.metadata
    if weights:
        facts = replace(facts, calibration={**facts.calibration, WEIGHTS: weights})
    return replace(side, metadata=facts, layer_ids=layer_ids)


def remarks(tokens: int, head_dim: int, positions: Positions | None = None, context: int | None = 0) -> tuple[str, ...]:
    """What is to be said about a calibration set.

    Args:
        tokens: of it.
        head_dim: channels per head.
        positions: that the fit is made for.
        context: that was asked for; None leaves it to the model.
    """
    said = []
    enough = FEW_TOKENS_PER_CHANNEL * head_dim
    if tokens < enough:
        said.append(f"only {tokens} calibration tokens for head_dim {head_dim}; {enough} or more make a sound fit")
    if positions is None and context != 0:
        said.append(
            "the model's rotary embedding is not known, so transforms fit the positions of the dump alone; "
            "dump requests as long as those that will be served"
        )
    return tuple(said)


def reach(positions: Positions | None, longest: int) -> dict[str, Any]:
    """How far a fit reaches, as rotation files state it.

    Args:
        positions: that it is made for; None for those of the dump alone.
        longest: tokens of the longest request of the dump.

    Returns:
        ``context``, positions, and ``rope``, the embedding that keys were moved to them by
        (:data:`oscar_rotation.math.rope.Rope`; empty for positions of the dump alone).
    """
    return (
        {"context": longest, "rope": {}}
        if positions is None
        else {"context": positions.context, "rope": positions.rope}
    )


def package_version() -> str:
    """Version of the installed distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version("sglang-oscar")
    except importlib.metadata.PackageNotFoundError:
        return ""
