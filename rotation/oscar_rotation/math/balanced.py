"""The transform of the recipe ``plus``: balance what is stored against how it is read.

Keys are stored as k T and read with q T^-T, so q . k is what it was for every invertible T; a rotation is the special
case T^-T = T. After T the quantizer sees rows with second moment T^T C_K T and, once a Hadamard matrix has spread them
evenly, adds an error that is about white and as large as the rows are: s T^T C_K T has trace d s^2. Seen through the
queries that error has the energy

    tr(T^-1 C_Q T^-T) tr(T^T C_K T) / d * (a constant of the quantizer).

Only M = T T^T matters in it, and its minimum over all positive definite M is where the derivative is zero, that is
where M C_K M is a multiple of C_Q: M is the matrix geometric mean of C_K^-1 and C_Q. There the product is
(sum of sigma)^2 / d, with sigma the singular values of C_Q^(1/2) C_K^(1/2). By the Cauchy-Schwarz inequality that is
never more than tr(C_Q) tr(C_K) / d, which every orthogonal T gives. At the minimum both second moments are the same
matrix, with eigenvalues sigma, and it does not change if keys are multiplied by any invertible matrix and queries by
its inverse transpose: outliers that are a matter of coordinates vanish, however strong they are.

In that common eigenbasis there is no choice between directions of much key energy and of much query energy. The
first d/G rows of a Hadamard matrix in bit-reversed order are constant inside a group of G channels; what lies along
them shifts a whole group, and the zero point takes it. They are given to the largest sigma.

Moments are estimates, and their off-diagonal parts are the less certain ones; :func:`shrunk` halves those before they
are balanced. A diagonal target is the one that keeps outliers harmless: scaling a channel of the keys, and its
inverse in the queries, scales the diagonal alike.

The same holds for values, stored as v T and read through o_proj: the error of token t reaches the residual stream as
S_t e_t W_o, so the metric is W_o W_o^T, summed over the query heads of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_rotation.math.eigenbasis import eigenbasis
from oscar_rotation.math.hadamard import bit_reversal_matrix, hadamard

COMPOSITION = "u_h_br"
"""What files call matrices of :func:`balance`."""

FLOOR = 1e-9
"""Smallest eigenvalue of a second moment, relative to its largest: below lies what calibration did not see."""


SHRINKAGE = 0.5
"""How far second moments go toward their diagonals before they are balanced."""


@dataclass(frozen=True)
class Balanced:
    """A transform and what undoes it.

    Attributes:
        transform: T, float64 [d, d]; a row vector x is stored as x @ transform.
        dual: T^-T, float64 [d, d]; what reads x is multiplied by it, and x = y @ dual.T.
        sigma: float64 [d], singular values in descending order, the common second moment's eigenvalues.
    """

    transform: torch.Tensor
    dual: torch.Tensor
    sigma: torch.Tensor


def shrunk(moment: torch.Tensor, share: float = SHRINKAGE) -> torch.Tensor:
    """(1 - share) moment + share diag(moment): shrinkage toward a diagonal target (Schaefer and Strimmer 2005).

    Args:
        moment: [..., d, d].
        share: 0 to 1.

    Returns:
        float64 [..., d, d].
    """
    wide = moment.double()
    return (1 - share) * wide + share * torch.diag_embed(wide.diagonal(dim1=-2, dim2=-1))


def root(moment: torch.Tensor) -> torch.Tensor:
    """Symmetric square root of a second moment, its eigenvalues bounded from below by :data:`FLOOR`.

    Raises:
        ValueError: if the moment is not square, not finite or zero.
    """
    values, vectors = eigenbasis(moment.double().cpu())
    largest = float(values[-1])
    if largest <= 0:
        raise ValueError("a second moment is zero: calibration saw nothing")
    return (vectors * values.clamp_min(FLOOR * largest).sqrt()) @ vectors.mT


def balance(stored: torch.Tensor, reading: torch.Tensor) -> Balanced:
    """The transform that minimizes the error seen through ``reading``.

    Args:
        stored: second moment of what is stored, [d, d], d as of :func:`oscar_rotation.math.hadamard.hadamard`.
        reading: second moment of what reads it, [d, d].

    Raises:
        ValueError: shapes that disagree, d of no Hadamard matrix, or a moment that is zero or not finite.
    """
    if stored.shape != reading.shape:
        raise ValueError(f"second moments must have one shape, got {list(stored.shape)} and {list(reading.shape)}")
    d = stored.shape[0]
    stored_root, reading_root = root(stored), root(reading)
    left, sigma, right = torch.linalg.svd(reading_root @ stored_root)
    transform, dual = reading_root @ left / sigma.sqrt(), stored_root @ right.mT / sigma.sqrt()
    # The sign of a singular vector is free; the largest entry of a column of T is positive, so that a refit agrees.
    largest = transform.abs().argmax(0)
    signs = transform[largest, torch.arange(d)].sign()
    spread = hadamard(d) @ bit_reversal_matrix(d)
    # So is the scale. Rows keep their mean energy, so that 16-bit windows hold numbers of the usual size.
    scale = float((stored.double().trace() / sigma.sum()).sqrt())
    return Balanced(scale * (transform * signs) @ spread, (dual * signs) @ spread / scale, sigma)


def gain(stored: torch.Tensor, reading: torch.Tensor) -> float:
    """(sum of sigma)^2 / (tr tr): the error that balancing leaves of what a rotation has, at most 1."""
    sigma = torch.linalg.svdvals(root(reading) @ root(stored))
    return float(sigma.sum() ** 2 / (stored.double().trace() * reading.double().trace()))
