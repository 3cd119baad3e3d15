"""Hadamard matrix, bit reversal and the permutation P (paper, appendices A.1 and A.4); all float64."""

from __future__ import annotations

import torch


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def _require_power_of_two(n: int) -> None:
    if not is_power_of_two(n):
        raise ValueError(f"a Hadamard rotation needs a head_dim that is a power of two, got {n}")


def has_hadamard(n: int) -> bool:
    """Whether :func:`hadamard` makes a matrix of this size: 1, 2, 4, 8, ... or 12, 24, 48, ..."""
    return is_power_of_two(n) or (n % 12 == 0 and is_power_of_two(n // 12))


NO_HADAMARD = "a Hadamard rotation needs a power of two or 12 times one"
"""Why there is none."""


def hadamard(n: int) -> torch.Tensor:
    """Normalized Hadamard matrix: of a power of two Sylvester's, else the Kronecker product of one of size 12 with
    Sylvester's, as in QuaRot (Ashkboos et al. 2024, arXiv 2404.00456) and QuIP# (Tseng et al. 2024, arXiv 2402.04396).

    Symmetric and orthogonal, hence its own inverse; all entries have one magnitude, those of the first row one sign.

    Args:
        n: size, a power of two or 12 times one.

    Returns:
        float64 [n, n].

    Raises:
        ValueError: if n is neither.
    """
    if is_power_of_two(n):
        return sylvester_hadamard(n)
    if not has_hadamard(n):
        raise ValueError(f"{NO_HADAMARD}, got {n}")
    return (torch.kron(_paley_of_12(), (sylvester_hadamard(n // 12) * (n // 12) ** 0.5).round()) / n**0.5).contiguous()


def _paley_of_12() -> torch.Tensor:
    """Paley's second construction (1933) for the field of 5 elements: a symmetric matrix of ones and minus ones, its
    first row and column of ones. float64 [12, 12]."""
    difference = (torch.arange(5)[:, None] - torch.arange(5)) % 5
    character = torch.where(difference == 0, 0, torch.where((difference == 1) | (difference == 4), 1, -1))
    conference = torch.ones(6, 6, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = character.double()
    unit = torch.eye(6, dtype=torch.float64)
    plus, minus = conference + unit, conference - unit
    matrix = torch.cat([torch.cat([plus, minus], 1), torch.cat([minus, -plus], 1)])
    return matrix[0][:, None] * matrix * matrix[0]


def sylvester_hadamard(n: int) -> torch.Tensor:
    """Normalized Walsh-Hadamard matrix in Sylvester (natural) order: H[i, j] = (-1)^popcount(i & j) / sqrt(n).

    Symmetric and orthogonal, hence its own inverse (paper, appendix A.1).

    Args:
        n: size, a power of two.

    Returns:
        float64 [n, n].

    Raises:
        ValueError: if n is not a power of two.
    """
    _require_power_of_two(n)
    signs = torch.ones(1, 1, dtype=torch.float64)
    while signs.shape[0] < n:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    # One division at the end instead of one by sqrt(2) per doubling: all entries get the same magnitude exactly.
    return signs / n**0.5


def bit_reversal(n: int) -> torch.Tensor:
    """The bit-reversal permutation of 0..n-1, for instance 0 4 2 6 1 5 3 7 for n = 8.

    Of 12 times a power of two the digits are reversed of which the first has the radix 12 and the others 2.

    Args:
        n: size, a power of two or 12 times one.

    Returns:
        int64 [n]; of a power of two an involution.

    Raises:
        ValueError: if n is neither.
    """
    if not has_hadamard(n):
        raise ValueError(f"{NO_HADAMARD}, got {n}")
    first = 1 if is_power_of_two(n) else 12
    order = torch.zeros(1, dtype=torch.int64)
    while order.numel() < n // first:
        order = torch.cat([2 * order, 2 * order + 1])
    return (first * order + torch.arange(first)[:, None]).flatten()


def pbr_permutation(eigenvalues: torch.Tensor) -> torch.Tensor:
    """Permuted bit reversal P: P[:, bitrev(i)] = e_(index of the i-th largest eigenvalue) (paper, appendix A.4).

    The ranking follows the values, whatever order they come in. So y P moves channel i to bitrev(i) where
    eigenvalues descend, and channel d-1-i to bitrev(i) where they ascend. Because bitrev(i) for i < d/G differs
    in the upper log2(d/G) bits, the d/G leading channels land in d/G different groups of G, for every power of
    two G and d.

    Args:
        eigenvalues: [d], any float dtype, d a power of two or 12 times one; equal values keep their order.

    Returns:
        float64 [d, d], a permutation matrix.

    Raises:
        ValueError: if d is neither.
    """
    d = eigenvalues.numel()
    ranking = torch.argsort(eigenvalues.double().cpu(), descending=True, stable=True)
    permutation = torch.zeros(d, d, dtype=torch.float64)
    permutation[ranking, bit_reversal(d)] = 1.0
    return permutation


def bit_reversal_matrix(n: int) -> torch.Tensor:
    """The bit reversal as a permutation matrix B, float64 [n, n]: y B moves channel i to bitrev(i)."""
    return torch.eye(n, dtype=torch.float64)[bit_reversal(n)]


def block_hadamard(n: int, block: int) -> torch.Tensor:
    """Hadamard matrices of size ``block`` along the diagonal, float64 [n, n].

    Raises:
        ValueError: if ``block`` is not a power of two or does not divide n.
    """
    if n % block:
        raise ValueError(f"blocks of {block} do not divide {n} channels")
    return torch.block_diag(*[sylvester_hadamard(block)] * (n // block))
