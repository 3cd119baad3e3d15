"""The transform of the recipe ``plus``: balance what is stored against how it is read.

Keys are stored as k T and read with q T^-T, so q . k is what it was for every invertible T; a rotation is the special
case T^-T = T. After T the quantizer sees rows with second moment T^T C_K T and, once a Hadamard matrix has spread them
evenly, adds an error that is about white and as large as the rows are: s T^T C_K T has trace d s^2. Seen through the
queries that error has the energy

    tr(T^-1 C_Q T^-T) tr(T^T C_K T) / d * (a constant of the quantizer).

Only M = T T^T matters in it, and its minimum over all positive definite M is the matrix geometric mean of C_K^-1 and
C_Q (set the derivative to zero: M^-1 C_Q M^-1 is a multiple of C_K), where it is (sum of sigma)^2 / d, with sigma the
singular values of C_Q^(1/2) C_K^(1/2). By the Cauchy-Schwarz inequality that is never more than tr(C_Q) tr(C_K) / d,
which every orthogonal T gives. At the minimum both second moments are the same matrix, with eigenvalues sigma, and it
does not change if keys are multiplied by any invertible matrix and queries by its inverse transpose: outliers that are
a matter of coordinates vanish, however strong they are.

In that common eigenbasis there is no choice between directions of much key energy and of much query energy. The
first d/G rows of a Hadamard matrix in bit-reversed order are constant inside a group of G channels; what lies along
them shifts a whole group, and the zero point takes it. They are given to the largest sigma.

The same holds for values, stored as v T and read through o_proj: the error of token t reaches the residual stream as
S_t e_t W_o, so the metric is W_o W_o^T, summed over the query heads of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_rotation.eigenbasis import eigenbasis
from oscar_rotation.hadamard import bit_reversal_matrix, sylvester_hadamard

FLOOR = 1e-7
"""Smallest eigenvalue of a second moment, relative to its largest: below lies what calibration did not see."""


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


def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of a symmetric positive semidefinite matrix, its eigenvalues bounded from below by :data:`FLOOR`.

    Raises:
        ValueError: if the matrix is not square, not finite or zero.
    """
    values, vectors = eigenbasis(matrix.double().cpu())
    largest = float(values[-1])
    if largest <= 0:
        raise ValueError("a second moment is zero: calibration saw nothing")
    return (vectors * values.clamp_min(FLOOR * largest) ** exponent) @ vectors.mT


def geometric_mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The matrix geometric mean A # B = A^(1/2) (A^(-1/2) B A^(-1/2))^(1/2) A^(1/2), float64 [d, d]."""
    root, inverse_root = power(a, 0.5), power(a, -0.5)
    return root @ power(inverse_root @ b.double().cpu() @ inverse_root, 0.5) @ root


def balance(stored: torch.Tensor, reading: torch.Tensor) -> Balanced:
    """The transform that minimizes the error seen through ``reading``.

    Args:
        stored: second moment of what is stored, [d, d], d a power of two.
        reading: second moment of what reads it, [d, d].

    Raises:
        ValueError: shapes that disagree, d not a power of two, or a moment that is zero or not finite.
    """
    if stored.shape != reading.shape:
        raise ValueError(f"second moments must have one shape, got {list(stored.shape)} and {list(reading.shape)}")
    d = stored.shape[0]
    half = power(geometric_mean(power(stored, -1), reading), 0.5)
    sigma, vectors = eigenbasis(half @ stored.double().cpu() @ half, "descending")
    spread = vectors @ sylvester_hadamard(d) @ bit_reversal_matrix(d)
    # The scale is free. Rows keep their mean energy, so that 16-bit windows hold numbers of the usual size.
    scale = float((stored.double().trace() / sigma.sum()).sqrt())
    inverse_half = torch.linalg.inv(half)
    return Balanced(scale * half @ spread, inverse_half @ spread / scale, sigma)


def gain(stored: torch.Tensor, reading: torch.Tensor) -> float:
    """(sum of sigma)^2 / (tr tr): the error that balancing leaves of what a rotation has, at most 1."""
    sigma = torch.linalg.svdvals(power(stored, 0.5) @ power(reading, 0.5))
    return float(sigma.sum() ** 2 / (stored.double().trace() * reading.double().trace()))
