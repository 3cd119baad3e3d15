"""Rotations as products of orthogonal factors (paper, equation 3 and table 4), and no rotation.

U holds eigenvectors of a covariance, H is the Hadamard matrix, P the permuted bit reversal that ranks channels by
eigenvalue, B the plain bit reversal. A composition's name lists its factors from left to right, as a row vector
meets them, with "r" for U; "plain", "pbr", "br" and "br_h128" start with U without saying so. U is always in the
model's own basis.

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

from oscar_kernels.layout import largest_group
from oscar_rotation.math.hadamard import bit_reversal_matrix, block_hadamard, hadamard, pbr_permutation

Composition = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(eigenvectors [d, d], eigenvalues [d]) -> float64 [d, d], orthogonal, on the CPU."""

DEFAULT_COMPOSITION = "r_h_pbr"
H128 = 128


def _factors(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """U, H and P in float64 on the CPU.

    Raises:
        ValueError: if there is no Hadamard matrix of d or the shapes disagree.
    """
    d = eigenvalues.numel()
    if tuple(eigenvectors.shape) != (d, d):
        raise ValueError(f"{d} eigenvalues need eigenvectors [{d}, {d}], got {tuple(eigenvectors.shape)}")
    return eigenvectors.double().cpu(), hadamard(d), pbr_permutation(eigenvalues)


def r_h_pbr(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U H P, the method (paper, equation 3 and appendix A.4).

    Args:
        eigenvectors: U, [d, d], columns in the order of ``eigenvalues``; d as of
            :func:`oscar_rotation.math.hadamard.hadamard`.
        eigenvalues: [d], in any order.

    Returns:
        float64 [d, d], orthogonal, on the CPU.

    Raises:
        ValueError: if there is no Hadamard matrix of d or the shapes disagree.
    """
    u, h, p = _factors(eigenvectors, eigenvalues)
    return u @ h @ p


def plain(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U: each channel is one eigendirection. Arguments and errors as :func:`r_h_pbr`."""
    u, _, _ = _factors(eigenvectors, eigenvalues)
    return u


def pbr(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U P: eigendirections dealt out to the groups (paper, table 4, "w/o H")."""
    u, _, p = _factors(eigenvectors, eigenvalues)
    return u @ p


def br(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U B: bit reversal of the column index, whatever the eigenvalues."""
    u, _, _ = _factors(eigenvectors, eigenvalues)
    return u @ bit_reversal_matrix(eigenvalues.numel())


def br_h128(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U B H128: as :func:`br`, then a Hadamard within each block of 128 channels, or of the largest power of two
    below that divides them."""
    d = eigenvalues.numel()
    return br(eigenvectors, eigenvalues) @ block_hadamard(d, largest_group(d, H128))


def r_h(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = U H: equal importance of all channels, no balance between groups (paper, table 4, "w/o P")."""
    u, h, _ = _factors(eigenvectors, eigenvalues)
    return u @ h


def h_pbr(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = H P: the eigenvalues rank channels, the eigenvectors are left out (paper, table 4, "w/o U")."""
    _, h, p = _factors(eigenvectors, eigenvalues)
    return h @ p


def h_r_pbr(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = H U P: mixed before the eigenbasis instead of after it."""
    u, h, p = _factors(eigenvectors, eigenvalues)
    return h @ u @ p


def h_pbr_r(eigenvectors: torch.Tensor, eigenvalues: torch.Tensor) -> torch.Tensor:
    """R = H P U: mixed and permuted first, U last."""
    u, h, p = _factors(eigenvectors, eigenvalues)
    return h @ p @ u


COMPOSITIONS: dict[str, Composition] = {
    "r_h_pbr": r_h_pbr,
    "r_h": r_h,
    "plain": plain,
    "pbr": pbr,
    "br": br,
    "br_h128": br_h128,
    "h_pbr": h_pbr,
    "h_r_pbr": h_r_pbr,
    "h_pbr_r": h_pbr_r,
}
"""Composition name, as it appears in file names -> function of (eigenvectors, eigenvalues)."""


def identity(d: int) -> torch.Tensor:
    """No rotation: naive INT2. float64 [d, d]."""
    return torch.eye(d, dtype=torch.float64)
