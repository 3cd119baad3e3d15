"""What a recipe is: fitted to a dump, or built in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from oscar_rotation.dump import DumpReader
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.errors import DumpError
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.key_errors import with_key_errors
from oscar_rotation.fit.layer import Progress
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.result import FitResult

PUBLISHED = "paper"
"""The recipe of the published method. Covariances suffice for it and it reads no weights, so errors point to it."""


@dataclass(frozen=True)
class FitRequest:
    """What is fitted, on what, and how.

    Attributes:
        dump: folder of a dump.
        options: how; a recipe reads those that its ``options`` name.
        model: folder or hub id of the model's weights; None for what the dump names.
        device: "auto", "cpu", "cuda" or another torch device.
        allow_incomplete: use the whole chunks of an interrupted dump.
        progress: told about every step.
    """

    dump: Path
    options: FitOptions = field(default_factory=FitOptions)
    model: str | None = None
    device: str = "auto"
    allow_incomplete: bool = False
    progress: Progress | None = None


@dataclass(frozen=True)
class FittedRecipe:
    """A recipe whose matrices are fitted to a dump.

    Attributes:
        name: as commands take it and files state it.
        summary: one line.
        fit: does it; raises DumpError where the dump or the weights do not do, and ValueError for an unknown device.
        options: fields of :class:`FitOptions` that it reads; others are refused where they are given.
        needs_activations: whether a dump of covariances does not suffice.
        needs_weights: whether it reads the model's output projections.
        suffixes: file formats that hold its result, the usual one first.
        names: objective and composition that its files of a side state, and are named by.
    """

    name: str
    summary: str
    fit: Callable[[FitRequest], FitResult]
    options: frozenset[str]
    needs_activations: bool
    needs_weights: bool
    suffixes: tuple[str, ...]
    names: Callable[[FitOptions, Side], tuple[str, str]]

    def run(self, request: FitRequest) -> FitResult:
        """Fit, and state in the files which weights they are for, which layers of the model, where not all, and what
        errors keys had.

        Raises:
            DumpError: as ``fit``, or the model's losses are asked for, and some of its layers keep no keys and values.
        """
        manifest = DumpManifest.read(request.dump) if request.dump.is_dir() else None
        ids = None if manifest is None else manifest.layer_ids
        if ids is not None and request.options.text is not None:
            raise DumpError(
                f"{request.dump}: is of some layers of its model only, whose losses are not measured; drop --text"
            )
        result = self.fit(request).of_model(manifest.weights_digest if manifest else "", ids)
        if not is_covariance_dump(request.dump):
            dump = DumpReader(request.dump, allow_incomplete=request.allow_incomplete)
            device = choose_device(request.device)
            chunks = dump.fit_chunks(request.options.include_warmup)
            key = with_key_errors(result.key, dump, chunks, request.options.group_size, device)
            result = replace(result, key=key)
        asked = request.options.overrides
        if manifest is None or asked in (None, manifest.model_overrides):
            return result
        said = (
            f"the dump's server ran with --json-model-override-args '{json.dumps(manifest.model_overrides)}', not with "
            "those given: what requests look like is the dump's, where in the context they stand is as given"
        )
        return replace(result, remarks=(*result.remarks, said))

    @property
    def needs(self) -> str:
        """What a fit needs, in words."""
        dump = "a dump of activations" if self.needs_activations else "a dump of activations or covariances"
        return f"{dump} and the model's output projections" if self.needs_weights else dump


@dataclass(frozen=True)
class BuiltInRecipe:
    """A recipe without data: one orthogonal matrix for all layers of a model.

    Attributes:
        name: accepted in place of a rotation file.
        summary: one line.
        matrix: head_dim -> float64 [head_dim, head_dim]; raises ValueError where there is none of that size.
    """

    name: str
    summary: str
    matrix: Callable[[int], torch.Tensor]

    def build(self, *, num_layers: int, head_dim: int, side: Side) -> RotationSet:
        """The matrix for every layer: float32 [num_layers, head_dim, head_dim], no eigenvalues, no clip ratios.

        Raises:
            ValueError: there is none of that size.
        """
        rotations = self.matrix(head_dim).float().expand(num_layers, -1, -1).contiguous()
        return RotationSet(rotations, metadata=RotationMetadata(objective=self.name, side=side))


def activations(request: FitRequest, recipe: str) -> DumpReader:
    """The dump of a request, for a recipe that needs activations.

    Raises:
        DumpError: it is broken, or holds covariances.
    """
    if is_covariance_dump(request.dump):
        raise DumpError(
            f"{request.dump}: holds covariances; the recipe {recipe} needs a dump of activations, "
            f"--recipe {PUBLISHED} does not"
        )
    return DumpReader(request.dump, allow_incomplete=request.allow_incomplete)


def output_weights(request: FitRequest, dump: DumpReader, recipe: str) -> OutputWeights:
    """The output projections of the model that was dumped: what the dump says of them, else the weights of the
    request's model, or of the one that the dump names.

    Raises:
        DumpError: nobody names a model, or its weights cannot be had.
    """
    remedy = f"name its weights' folder or hub id with --model, or fit with --recipe {PUBLISHED}"
    named = (dump.manifest.weights or dump.manifest.model_id) if dump.manifest else ""
    source = request.model or named
    if not source:
        raise DumpError(f"{dump.root}: does not name its model, whose weights the recipe {recipe} reads; {remedy}")
    try:
        if dump.manifest is None:
            return OutputWeights(source, overrides=request.options.overrides)
        asked, ran = request.options.overrides, dump.manifest.model_overrides
        recorded = dump.output_reader if dump.has_output_readers else None
        return OutputWeights(source, dump.manifest.layer_ids, ran if asked is None else asked, recorded)
    except DumpError as error:
        raise DumpError(f"{error}; {remedy}") from error
