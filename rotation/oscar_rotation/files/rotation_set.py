"""What a rotation file holds, in memory, and the checks that every rotation passes before it is used."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from oscar_kernels.layout import EXACT
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.bounds import parsed
from oscar_rotation.files.by_head import Run, check_numbers, heads_of, runs
from oscar_rotation.files.codebooks import Codebooks, check_codings

Side = Literal["k", "v"]

DEFAULT_CLIP_RATIOS: dict[Side, float] = {"k": 0.96, "v": 0.92}
"""Clip ratios where a file has none (paper, section 5.1)."""

LONGEST_TEXT = 4096
"""Characters of one text of the metadata; the longest is the path of a model."""

ORTHOGONALITY_TOLERANCE = 1e-3
"""Largest accepted entry of |R^T R - I|. float32 storage of an orthogonal matrix gives about 1e-6."""


@dataclass(frozen=True)
class RotationMetadata:
    """Where rotations come from. An empty string means unknown: the public .pt schema has only ``objective``.

    Attributes:
        objective: covariance target, for instance "qqt", "sst", or the name of a data-free recipe.
        side: "k", "v" or "" where not recorded.
        composition: for instance "r_h_pbr".
        eigen_order: "ascending" or "descending".
        model_id: model that was calibrated.
        model_hash: hash of its configuration.
        version: version of the software that wrote the file.
        recipe: how it was fitted, a name of :data:`oscar_rotation.recipes.FITTED`.
        calibration: facts about the data (tokens, requests, target, ...); JSON values.
    """

    objective: str = ""
    side: str = ""
    composition: str = ""
    eigen_order: str = ""
    model_id: str = ""
    model_hash: str = ""
    version: str = ""
    recipe: str = ""
    calibration: dict[str, Any] = field(default_factory=dict)

    def to_strings(self) -> dict[str, str]:
        """As the string-to-string map that file formats store; empty fields are left out."""
        texts = {name: value for name, value in vars(self).items() if isinstance(value, str) and value}
        if self.calibration:
            texts["calibration"] = json.dumps(self.calibration, sort_keys=True)
        return texts

    @classmethod
    def from_strings(cls, texts: dict[str, str]) -> RotationMetadata:
        """Inverse of :meth:`to_strings`; unknown names are ignored.

        Raises:
            ValueError: if ``calibration`` is not a JSON object, or a text is longer than a line.
        """
        names = set(cls.__dataclass_fields__) - {"calibration"}
        calibration = parsed(texts.get("calibration", "{}"))
        if not isinstance(calibration, dict):
            raise ValueError("calibration is not a JSON object")
        known = {name: texts[name] for name in names if name in texts}
        found = cls(calibration=calibration, **known)
        found.check_lines()
        return found

    def check_lines(self) -> None:
        """Refuse texts that no file may state.

        Raises:
            ValueError: a text is longer than a line.
        """
        for name, text in vars(self).items():
            if isinstance(text, str) and (len(text) > LONGEST_TEXT or not text.isprintable()):
                raise ValueError(f"{name} is not a line of at most {LONGEST_TEXT} characters")


@dataclass(frozen=True)
class RotationSet:
    """One rotation per layer, shared by the kv heads of the layer, or one per kv head.

    Attributes:
        rotations: float32 [layers, head_dim, head_dim]; a row vector x becomes x @ rotations[layer]. With one per kv
            head: [layers, kv_heads, head_dim, head_dim].
        eigenvalues: float32 [layers, head_dim] or [layers, kv_heads, head_dim], in the column order of U, or None
            (data-free recipes).
        clip_ratios: one per layer, each in (0, 1], or None where the file does not say. A layer of keys may have one
            per kv head instead, and so for gains, bits and codings (:mod:`oscar_rotation.files.by_head`).
        metadata: provenance.
        duals: float32 like ``rotations``, the inverse transposes of transforms that are not orthogonal (recipe
            "plus"): what reads x @ rotations[layer] is multiplied by duals[layer]. None: rotations, their own duals.
        bits: of a code, one per layer, or 16 where a layer is left exact, of :data:`oscar_kernels.layout.WIDTHS`; None
            for 2 in every layer.
        gains: one per layer, each in [:data:`LEAST_GAIN`, 1], of scales fitted to the codes
            (:func:`oscar_kernels.codec.fitted_parameters`); None for the scales of the range.
        centers: float32 [layers, kv_heads, head_dim], subtracted from x @ rotations[layer] before it is stored; None
            for nothing. Keys only.
        layer_ids: which layers of the model these are, ascending, for a model of which only some have a cache to
            rotate; None where they are all of its layers.
        codings: what codes stand for, one of :data:`oscar_kernels.layout.CODINGS` per layer; None for affine in all.
        codebooks: of the layers with that coding; None where there is none.
    """

    rotations: torch.Tensor
    eigenvalues: torch.Tensor | None = None
    clip_ratios: tuple[float | tuple[float, ...], ...] | None = None
    metadata: RotationMetadata = field(default_factory=RotationMetadata)
    duals: torch.Tensor | None = None
    centers: torch.Tensor | None = None
    gains: tuple[float | tuple[float, ...], ...] | None = None
    bits: tuple[int | tuple[int, ...], ...] | None = None
    layer_ids: tuple[int, ...] | None = None
    codings: tuple[str | tuple[str, ...], ...] | None = None
    codebooks: Codebooks | None = None

    @property
    def recipe(self) -> str:
        """What the file states; of files that do not, "plus" where they hold more than orthogonal matrices, else
        "paper"."""
        return self.metadata.recipe or ("paper" if replace(self, bits=None).only_rotations else "plus")

    @property
    def only_rotations(self) -> bool:
        """Whether matrices are orthogonal, nothing is centered, scales are of the range, codes affine and of 2 bits."""
        others = (self.duals, self.centers, self.gains, self.bits, self.codings, self.codebooks)
        return all(other is None for other in others)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.rotations.shape[0]

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the layers in the model."""
        return tuple(range(self.num_layers)) if self.layer_ids is None else self.layer_ids

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.rotations.shape[-1]

    def runs(self, layer: int) -> list[Run]:
        """How codes of a layer are made: once, or by kv head."""
        return runs(self, layer)

    def width(self, layer: int) -> int:
        """Bits of a code of a layer whose heads are alike, or 16 where it is left exact."""
        (run,) = self.runs(layer)
        return run.bits

    def exact(self, layer: int) -> bool:
        """Whether a layer is left exact: 16 bits, no codes."""
        return self.runs(layer)[0].bits == EXACT

    def coding(self, layer: int) -> str:
        """What codes of a layer whose heads are alike stand for."""
        (run,) = self.runs(layer)
        return run.coding

    @property
    def coded_heads(self) -> int | None:
        """kv heads of layers whose codes are made by kv head; None where there are none."""
        return next(filter(None, (heads_of(self, layer) for layer in range(self.num_layers))), None)

    @property
    def per_head(self) -> bool:
        """Whether every kv head has a rotation of its own."""
        return self.rotations.ndim == 4


def orthogonality_errors(rotations: torch.Tensor) -> torch.Tensor:
    """max |R^T R - I| of each matrix, computed in float64; [..., d, d] -> [...]."""
    exact = rotations.double()
    gram = exact.mT @ exact
    return (gram - torch.eye(exact.shape[-1], dtype=exact.dtype, device=exact.device)).abs().amax((-2, -1))


def inversion_errors(transforms: torch.Tensor, duals: torch.Tensor) -> torch.Tensor:
    """max |T D^T - I| of each pair, computed in float64; [..., d, d] twice -> [...]."""
    product = transforms.double() @ duals.double().mT
    return (product - torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)).abs().amax((-2, -1))


def check_rotation_set(loaded: RotationSet, source: str) -> None:
    """Refuse rotations that no model could use.

    Args:
        loaded: what was read.
        source: the file's path, for the message.

    Raises:
        RotationFileError: wrong shape or dtype, no layers, NaN or infinite entries, not orthogonal (beyond
            :data:`ORTHOGONALITY_TOLERANCE`), clip ratios, gains, bits, codings or codebooks that do not fit, or a text
            of the metadata that is no line.
    """
    try:
        loaded.metadata.check_lines()
    except ValueError as error:
        raise RotationFileError(f"{source}: {error}") from error
    rotations = loaded.rotations
    if rotations.ndim not in (3, 4) or 0 in rotations.shape or rotations.shape[-2] != rotations.shape[-1]:
        raise RotationFileError(
            f"{source}: rotations have shape {list(rotations.shape)}, expected [layers, head_dim, head_dim]"
        )
    if rotations.dtype != torch.float32:
        raise RotationFileError(f"{source}: rotations are {rotations.dtype}, expected torch.float32; save them so")
    bad = (~rotations.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    if bad:
        raise RotationFileError(f"{source}: the rotation of layer {bad[0]} holds NaN or infinite entries; fit it again")
    if loaded.duals is None:
        all_errors, what, formula = orthogonality_errors(rotations), "is not orthogonal", "|R^T R - I|"
    else:
        _check_duals(loaded, source)
        all_errors = inversion_errors(rotations, loaded.duals)
        what, formula = "does not have the inverse that the file states", "|T D^T - I|"
    errors = all_errors.flatten(1).amax(1) if loaded.per_head else all_errors
    worst = int(errors.argmax())
    if float(errors[worst]) > ORTHOGONALITY_TOLERANCE:
        raise RotationFileError(
            f"{source}: the rotation of layer {worst} {what}: "
            f"max {formula} is {float(errors[worst]):.3g}, allowed is {ORTHOGONALITY_TOLERANCE:g}; fit it again"
        )
    if loaded.recipe == "paper" and not replace(loaded, bits=None).only_rotations:
        raise RotationFileError(f"{source}: states the recipe paper, but holds more than rotations; fit it again")
    _check_companions(loaded, source)
    check_codings(loaded, source)


def _check_duals(loaded: RotationSet, source: str) -> None:
    duals = loaded.duals
    assert duals is not None
    if duals.shape != loaded.rotations.shape or duals.dtype != torch.float32 or not bool(duals.isfinite().all()):
        raise RotationFileError(
            f"{source}: duals are {duals.dtype} {list(duals.shape)}, expected finite torch.float32 "
            f"{list(loaded.rotations.shape)}; fit the file again"
        )


def _check_companions(loaded: RotationSet, source: str) -> None:
    layers = loaded.num_layers
    centers = loaded.centers
    if centers is not None:
        wanted = (layers, centers.shape[1] if centers.ndim == 3 else 0, loaded.head_dim)
        if centers.ndim != 3 or tuple(centers.shape) != wanted or centers.dtype != torch.float32 or 0 in centers.shape:
            raise RotationFileError(
                f"{source}: centers are {centers.dtype} {list(centers.shape)}, expected torch.float32 "
                f"[{layers}, kv_heads, {loaded.head_dim}]"
            )
        if not bool(centers.isfinite().all()):
            raise RotationFileError(f"{source}: the centers hold NaN or infinite entries; fit the file again")
    eigenvalues = loaded.eigenvalues
    if eigenvalues is not None:
        if eigenvalues.shape != loaded.rotations.shape[:-1] or eigenvalues.dtype != torch.float32:
            raise RotationFileError(
                f"{source}: eigenvalues are {eigenvalues.dtype} {list(eigenvalues.shape)}, "
                f"expected torch.float32 {list(loaded.rotations.shape[:-1])}"
            )
        if not bool(eigenvalues.isfinite().all()):
            raise RotationFileError(f"{source}: the eigenvalues hold NaN or infinite entries; fit the file again")
    check_numbers(loaded, source)
