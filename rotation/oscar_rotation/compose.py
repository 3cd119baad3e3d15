"""Rotations as products of orthogonal factors: R = U H P and the data-free recipes (paper, equation 3).

The order of U's columns is part of the rotation. Column j of U meets Walsh row j of H, and rows 0 .. d/G - 1 of
H P are constant inside every group of G channels: what lies along the first d/G columns of U shifts a whole group
and is absorbed by its zero point, so it does not widen the group's range. In "ascending" order, the default and
what ``torch.linalg.eigh`` returns, these are the directions of *least* query energy, where keys often have their
outliers; in "descending" order, the paper's notation, those of the *largest*. P is the same rule in both orders:
the i-th largest eigenvalue's index goes to bit-reversed position i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oscar_rotation.hadamard import pbr_permutation, sylvester_hadamard

DEFAULT_COMPOSITION = "r_h_pbr"


def r_h_pbr(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U H P (paper, equation 3 and appendix A.4).

    Args:
        eigenvectors: U, [d, d], columns in the order of ``eigenvalues``; d a power of two.
        eigenvalues: [d], in any order.

    Returns:
        float64 [d, d], orthogonal, on the CPU.

    Raises:
        ValueError: if d is not a power of two or the shapes disagree.
    """
    d = eigenvalues.numel()
    if tuple(eigenvectors.shape) != (d, d):
        raise ValueError(f"{d} eigenvalues need eigenvectors [{d}, {d}], got {tuple(eigenvectors.shape)}")
    return eigenvectors.double().cpu() @ sylvester_hadamard(d) @ pbr_permutation(eigenvalues)


COMPOSITIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"r_h_pbr": r_h_pbr}
"""Composition name, as it appears in file names -> function of (eigenvectors, eigenvalues)."""


def identity(d: int) -> torch.Tensor:
    """No rotation: naive INT2. float64 [d, d]."""
    return torch.eye(d, dtype=torch.float64)


RECIPES: dict[str, Callable[[int], torch.Tensor]] = {"identity": identity, "hadamard": sylvester_hadamard}
"""Data-free recipe name -> function of head_dim; accepted wherever a rotation file is.

``hadamard`` is the plain Walsh-Hadamard rotation of QuaRot.
"""
