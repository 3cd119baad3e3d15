"""Hadamard matrix, bit reversal and the permutation P (paper, appendices A.1 and A.4); all float64."""

from __future__ import annotations

import torch


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def _require_power_of_two(n: int) -> None:
    if not is_power_of_two(n):
        raise ValueError(f"a Hadamard rotation needs a head_dim that is a power of two, got {n}")


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

    Args:
        n: size, a power of two.

    Returns:
        int64 [n]; an involution.

    Raises:
        ValueError: if n is not a power of two.
    """
    _require_power_of_two(n)
    order = torch.zeros(1, dtype=torch.int64)
    while order.numel() < n:
        order = torch.cat([2 * order, 2 * order + 1])
    return order


def pbr_permutation(eigenvalues: torch.Tensor) -> torch.Tensor:
    """Permuted bit reversal P: P[:, bitrev(i)] = e_(index of the i-th largest eigenvalue) (paper, appendix A.4).

    The ranking follows the values, whatever order they come in. So y P moves channel i to bitrev(i) where
    eigenvalues descend, and channel d-1-i to bitrev(i) where they ascend. Because bitrev(i) for i < d/G differs
    in the upper log2(d/G) bits, the d/G leading channels land in d/G different groups of G, for every power of
    two G.

    Args:
        eigenvalues: [d], any float dtype, d a power of two; equal values keep their order.

    Returns:
        float64 [d, d], a permutation matrix.

    Raises:
        ValueError: if d is not a power of two.
    """
    d = eigenvalues.numel()
    ranking = torch.argsort(eigenvalues.double().cpu(), descending=True, stable=True)
    permutation = torch.zeros(d, d, dtype=torch.float64)
    permutation[ranking, bit_reversal(d)] = 1.0
    return permutation


def bit_reversal_matrix(n: int) -> torch.Tensor:
    """The bit reversal as a symmetric permutation matrix B, float64 [n, n]: y B moves channel i to bitrev(i)."""
    return torch.eye(n, dtype=torch.float64)[bit_reversal(n)]


def block_hadamard(n: int, block: int) -> torch.Tensor:
    """Hadamard matrices of size ``block`` along the diagonal, float64 [n, n].

    Raises:
        ValueError: if ``block`` is not a power of two or does not divide n.
    """
    if n % block:
        raise ValueError(f"blocks of {block} do not divide {n} channels")
    return torch.block_diag(*[sylvester_hadamard(block)] * (n // block))
