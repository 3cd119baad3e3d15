"""What is in a rotation file: geometry, orthogonality, spectrum, clip ratios, provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from oscar_kernels.layout import AFFINE
from oscar_rotation.files.by_head import flat
from oscar_rotation.files.reach import reach
from oscar_rotation.files.rotation_file import read_rotation_file, recorded_side
from oscar_rotation.files.rotation_set import RotationSet, inversion_errors, orthogonality_errors
from oscar_rotation.math.balanced import COMPOSITION
from oscar_rotation.math.hadamard import has_hadamard
from oscar_rotation.report.sharing import overlap, sharing_loss, unrelated_overlap

TOP_EIGENVALUES = 8
BAR = "\N{FULL BLOCK}"


def spectrum_summary(eigenvalues: torch.Tensor) -> dict[str, Any]:
    """Figures of one spectrum.

    Args:
        eigenvalues: [d], in any order.

    Returns:
        ``top``: the largest eigenvalues, descending; ``top_share``: their part of the trace; ``condition``: largest
        over smallest, None where the smallest is not positive; ``effective_rank``: exp of the entropy of the
        normalized spectrum, between 1 and d.
    """
    values = eigenvalues.double().sort(descending=True).values
    positive = values.clamp_min(0)
    total = float(positive.sum())
    top = positive[:TOP_EIGENVALUES]
    share = positive / total if total > 0 else torch.zeros_like(positive)
    entropy = float(-torch.special.xlogy(share, share).sum())
    return {
        "top": [float(value) for value in values[:TOP_EIGENVALUES]],
        "top_share": float(top.sum()) / total if total > 0 else None,
        "condition": float(values[0] / values[-1]) if float(values[-1]) > 0 else None,
        "effective_rank": float(torch.tensor(entropy, dtype=torch.float64).exp()) if total > 0 else None,
    }


def describe(path: str | Path) -> dict[str, Any]:
    """Everything that ``oscar inspect`` shows, as JSON values.

    Args:
        path: rotation file, .pt or .safetensors.

    Returns:
        ``path``, ``num_layers``, ``head_dim``, ``rotations_per_layer``, ``sharing`` (what one matrix per layer would
        lose, in words; empty where there is no more than one), ``positions`` (that it was fitted for, in words; empty
        where the file does not tell), ``recipe``, ``centers`` (lengths of the key centers, by
        layer and kv head; empty without), ``side``, ``objective``, the other metadata fields, ``orthogonality_error``
        (largest of all layers; of transforms with duals, how far they are from inverting each other) and ``layers``:
        one dict per layer with ``layer`` (its id in the model), ``orthogonality_error``, ``clip_ratio``, ``gain``,
        ``bits``, ``coding`` (these four by kv head where the file has them so), ``spectrum`` (see
        :func:`spectrum_summary`), ``sharing_loss`` and ``overlap`` (see :mod:`oscar_rotation.report.sharing`); the last
        five None where the file does not tell.

    Raises:
        RotationFileError: if the file cannot be used.
    """
    loaded = read_rotation_file(path)
    if loaded.duals is None:
        exactness = orthogonality_errors(loaded.rotations)
    else:
        exactness = inversion_errors(loaded.rotations, loaded.duals)
    errors = exactness.reshape(loaded.num_layers, -1).amax(1).tolist()
    layers = [
        {
            "layer": loaded.ids[layer],
            "orthogonality_error": errors[layer],
            "clip_ratio": loaded.clip_ratios[layer] if loaded.clip_ratios else None,
            "gain": loaded.gains[layer] if loaded.gains else None,
            "bits": loaded.bits[layer] if loaded.bits else 2,
            "coding": loaded.codings[layer] if loaded.codings else AFFINE,
            "spectrum": None if loaded.eigenvalues is None else spectrum_summary(_spectrum(loaded.eigenvalues[layer])),
            "sharing_loss": _sharing_loss(loaded, layer),
            "overlap": _overlap(loaded, layer),
        }
        for layer in range(loaded.num_layers)
    ]
    return {
        "path": str(path),
        "num_layers": loaded.num_layers,
        "head_dim": loaded.head_dim,
        "rotations_per_layer": loaded.rotations.shape[1] if loaded.per_head else 1,
        "sharing": _sharing(layers, loaded.head_dim),
        "positions": reach(loaded.metadata),
        "recipe": loaded.recipe,
        "centers": [] if loaded.centers is None else loaded.centers.norm(dim=-1).tolist(),
        **vars(loaded.metadata),
        "side": recorded_side(loaded, Path(path)),
        "orthogonality_error": max(errors),
        "layers": layers,
    }


def _overlap(loaded: RotationSet, layer: int) -> float | None:
    """See :func:`overlap`; None of transforms, and of a layer that is left exact."""
    rotations = loaded.per_head and loaded.duals is None and not loaded.exact(layer)
    return overlap(loaded.rotations[layer]) if rotations else None


def _sharing_loss(loaded: RotationSet, layer: int) -> float | None:
    """See :func:`sharing_loss`; None of rotations, of transforms that do not state how they were balanced, and of a
    layer that is left exact."""
    sigma = None if loaded.exact(layer) else loaded.eigenvalues
    if not loaded.per_head or loaded.duals is None or sigma is None or loaded.metadata.composition != COMPOSITION:
        return None
    usable = has_hadamard(loaded.head_dim) and float(sigma[layer].min()) > 0
    return sharing_loss(loaded.rotations[layer], sigma[layer]) if usable else None


def _sharing(layers: list[dict[str, Any]], head_dim: int) -> str:
    losses = [layer["sharing_loss"] for layer in layers if layer["sharing_loss"] is not None]
    overlaps = [layer["overlap"] for layer in layers if layer["overlap"] is not None]
    if losses:
        return (
            f"one transform per layer would raise the expected error by {sum(losses) / len(losses):.1%}, "
            f"in layers by {min(losses):.1%} to {max(losses):.1%}"
        )
    if overlaps:
        return (
            f"rotations of two heads overlap by {min(overlaps):.2f} to {max(overlaps):.2f}; the same ones by 1, "
            f"unrelated ones by {unrelated_overlap(head_dim):.2f}"
        )
    return ""


def _spectrum(eigenvalues: torch.Tensor) -> torch.Tensor:
    """[d]; of one spectrum per kv head, the mean, largest with largest."""
    return eigenvalues if eigenvalues.ndim == 1 else eigenvalues.sort(-1).values.mean(0)


def render(description: dict[str, Any]) -> Group:
    """The description as a rich renderable: a table of facts and a table of layers."""
    facts = Table(show_header=False, box=None, title=description["path"], title_justify="left")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for name, value in description.items():
        if name in ("path", "layers") or value in ("", {}, []):
            continue
        shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        if name == "centers":
            shown = f"one per kv head, of length {min(map(min, value)):.3g} to {max(map(max, value)):.3g}"
        facts.add_row(name.replace("_", " "), f"{shown:.2e}" if isinstance(shown, float) else str(shown))
    layers = Table(box=None, header_style="bold")
    shared = ("shared",) if description["sharing"] else ()
    coding = ("coding",) if {entry["coding"] for entry in description["layers"]} != {AFFINE} else ()
    for name in (
        "layer",
        "orthogonality error",
        "clip",
        "gain",
        "bits",
        *coding,
        "largest eigenvalues",
        "top 8 share",
        "condition",
        "eff. rank",
        *shared,
    ):
        layers.add_column(name, justify="left" if name == "largest eigenvalues" else "right")
    for entry in description["layers"]:
        spectrum = entry["spectrum"] or {}
        layers.add_row(
            str(entry["layer"]),
            f"{entry['orthogonality_error']:.1e}",
            _number(entry["clip_ratio"], ".3f"),
            _number(entry["gain"], ".3f"),
            " ".join(f"{bits} {BAR * bits}" for bits in flat([entry["bits"]])),
            *(" ".join(flat([entry[name]])) for name in coding),
            " ".join(f"{value:.3g}" for value in spectrum.get("top", [])[:4]) or "-",
            _number(spectrum.get("top_share"), ".1%"),
            _number(spectrum.get("condition"), ".2g"),
            _number(spectrum.get("effective_rank"), ".1f"),
            *(_shared(entry) for _ in shared),
        )
    return Group(facts, layers)


def _shared(entry: dict[str, Any]) -> str:
    """What sharing would lose of a layer's transforms, or how alike its rotations are."""
    return _number(entry["overlap"], ".2f") if entry["sharing_loss"] is None else f"+{entry['sharing_loss']:.1%}"


def _number(value: float | tuple[float, ...] | None, form: str) -> str:
    return "-" if value is None else " ".join(format(x, form) for x in flat([value]))
