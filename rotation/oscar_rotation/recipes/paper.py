"""The recipe ``paper``: the published method, rotations from covariances (algorithm 1, procedure Calibrate)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.dump import DumpManifest, DumpReader
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet, Side
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.layer import LayerFitter, Progress, SideFit, target_composition
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.result import FitResult, package_version, remarks
from oscar_rotation.fit.streamed import fit_covariances
from oscar_rotation.fit.targets import KEY_TARGETS, VALUE_TARGETS
from oscar_rotation.recipes.base import PUBLISHED, FitRequest, FittedRecipe


def fit(
    dump: DumpReader | str | Path,
    options: FitOptions | None = None,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> FitResult:
    """Fit key and value rotations of every layer.

    Covariances are accumulated on ``device``; eigenvectors are computed in float64 on the CPU with a fixed sign, so
    a refit of the same dump on the same kind of device gives the same files. Memory is one chunk of one layer.

    Args:
        dump: reader of a dump, or its folder, which may hold covariances instead of activations.
        options: targets, order, composition, clip ratios, report; the method's defaults.
        device: "auto", "cpu", "cuda" or another torch device.
        progress: told about every chunk.

    Returns:
        FitResult; float32 rotations [layers, head_dim, head_dim], or [layers, kv_heads, head_dim, head_dim] with
        one per kv head, with eigenvalues, clip ratios and metadata.

    Raises:
        DumpError: the dump is broken or does not suffice.
        ValueError: unknown device.
    """
    options = options or FitOptions()
    chosen_device = choose_device(device)
    if not isinstance(dump, DumpReader) and is_covariance_dump(Path(dump)):
        return _fit_streamed(Path(dump), options, progress)
    reader = dump if isinstance(dump, DumpReader) else DumpReader(dump)
    fitter = LayerFitter(reader, options, chosen_device, progress)
    layers = [fitter.run(layer) for layer in range(reader.num_layers)]
    calibration = {
        "tokens": fitter.tokens,
        "requests": sum(map(len, fitter.seq_lens.values())),
        "chunks": len(fitter.chunks),
        "include_warmup": options.include_warmup,
        "q_heads": fitter.q_heads,
        "kv_heads": fitter.kv_heads,
    }
    if options.fit_clip:
        calibration |= {"held_out_tokens": fitter.sampled_tokens, "clip_group_size": options.group_size}
    metadata = _metadata(reader.manifest, options, calibration)
    report: dict[str, Any] = {}
    if options.needs_samples:
        report = {
            "model_id": metadata["k"].model_id,
            "options": vars(options),
            "calibration": metadata["k"].calibration,
            "sampled_tokens": fitter.sampled_tokens,
            "held_out": options.fit_clip,
            "layers": [layer.report for layer in layers],
        }
    return FitResult(
        pack([layer.key for layer in layers], metadata["k"]),
        pack([layer.value for layer in layers], metadata["v"]),
        remarks(fitter.tokens, fitter.head_dim),
        report,
    )


def _fit_streamed(root: Path, options: FitOptions, progress: Progress | None) -> FitResult:
    streamed, keys, values = fit_covariances(root, options, progress)
    manifest = streamed.manifest
    calibration = {
        "tokens": streamed.tokens,
        "requests": streamed.requests,
        "include_warmup": False,
        "q_heads": manifest.q_heads,
        "kv_heads": manifest.kv_heads,
    }
    metadata = _metadata(manifest, options, calibration)
    return FitResult(
        pack(keys, metadata["k"]), pack(values, metadata["v"]), remarks(streamed.tokens, manifest.head_dim)
    )


def pack(sides: Sequence[SideFit], metadata: RotationMetadata) -> RotationSet:
    """One side of all layers as a rotation set."""
    spectra = [side.eigenvalues for side in sides if side.eigenvalues is not None]
    ratios = [side.clip_ratio for side in sides if side.clip_ratio is not None]
    return RotationSet(
        torch.stack([side.rotation for side in sides]),
        torch.stack(spectra) if spectra else None,
        tuple(ratios) if ratios else None,
        metadata,
    )


def _metadata(
    manifest: DumpManifest | None, options: FitOptions, calibration: dict[str, Any]
) -> dict[Side, RotationMetadata]:
    sides: tuple[Side, Side] = ("k", "v")
    stated = {side: names(options, side) for side in sides}
    return {
        side: RotationMetadata(
            objective=target,
            side=side,
            composition=composition,
            eigen_order=options.order,
            model_id=manifest.model_id if manifest else "",
            model_hash=manifest.model_hash if manifest else "",
            version=package_version(),
            recipe=RECIPE.name,
            calibration=calibration,
        )
        for side, (target, composition) in stated.items()
    }


def names(options: FitOptions, side: Side) -> tuple[str, str]:
    """Target and composition of a side."""
    target, known = (options.key_target, KEY_TARGETS) if side == "k" else (options.value_target, VALUE_TARGETS)
    return target, target_composition(known[target], options.composition)


def _fit_request(request: FitRequest) -> FitResult:
    dump = request.dump
    source = dump if is_covariance_dump(dump) else DumpReader(dump, allow_incomplete=request.allow_incomplete)
    return fit(source, request.options, device=request.device, progress=request.progress)


RECIPE = FittedRecipe(
    name=PUBLISHED,
    summary="the published method: orthogonal rotations U H P from covariance targets",
    fit=_fit_request,
    options=frozenset(field.name for field in fields(FitOptions))
    - {"context", "overrides", "bits", "text", "key_coding", "value_coding"},
    needs_activations=False,
    needs_weights=False,
    suffixes=(".pt", ".safetensors"),
    names=names,
)
