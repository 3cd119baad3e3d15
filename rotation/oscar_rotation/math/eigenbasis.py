"""Eigenvectors of a covariance target in a stated order, the same at every run (paper, appendix A.2)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

EigenOrder = Literal["ascending", "descending"]
EIGEN_ORDERS: tuple[str, ...] = get_args(EigenOrder)


def eigenbasis(covariance: torch.Tensor, order: EigenOrder = "ascending") -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, in float64.

    The sign of an eigenvector is free, and solvers choose it as they please; here the entry of largest magnitude
    (the first of equals) is positive, so that a refit gives the same rotation.

    Args:
        covariance: [d, d], any float dtype; only its symmetric part counts.
        order: "ascending" as ``eigh`` returns them, or "descending" as the paper writes them.

    Returns:
        eigenvalues [d] and eigenvectors [d, d] (columns), float64, on the device of ``covariance``.

    Raises:
        ValueError: if ``covariance`` is not square or not finite, or ``order`` is unknown.
    """
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"a covariance must be square, got shape {tuple(covariance.shape)}")
    if order not in EIGEN_ORDERS:
        raise ValueError(f"order must be one of {', '.join(EIGEN_ORDERS)}, got {order!r}")
    symmetric = covariance.double()
    symmetric = (symmetric + symmetric.T) / 2
    if not bool(symmetric.isfinite().all()):
        raise ValueError("the covariance holds NaN or infinite entries")
    eigenvalues, vectors = torch.linalg.eigh(symmetric)
    if order == "descending":
        eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
    largest = vectors.abs().argmax(dim=0, keepdim=True)
    signs = torch.where(vectors.gather(0, largest) < 0, -1.0, 1.0).to(vectors)
    return eigenvalues.contiguous(), (vectors * signs).contiguous()
