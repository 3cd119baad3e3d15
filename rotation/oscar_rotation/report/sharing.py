"""What the kv heads of a layer would lose if they shared one matrix, as far as a file with one per head tells.

*Balanced transforms* (recipes ``plus`` and ``focus``). With M = T T^T a head's expected error is proportional to
E(M) = tr(C_K M) tr(C_Q M^-1) (:mod:`oscar_rotation.math.balanced`). Its own T makes both second moments the same matrix
S with eigenvalues sigma, which the file has, so both can be taken back from it:

    S = (H P)^T diag(sigma) H P,    C_K = T^-T S T^-1,    C_Q = T S T^T,    E(T T^T) = (sum of sigma)^2.

A shared transform is what the fit makes for a layer: it balances the means of the moments over heads. The *sharing
loss* is sum E(shared) / sum E(own) - 1 over heads. It is about the white error that the transforms minimize, not about
accuracy, and it is 0 where heads are alike up to their size. How large the keys of a head are beside another's is not
in a file (a factor of T and its inverse in T^-T change nothing); they are taken as equally large.

*Rotations*. Every orthogonal matrix has the same E, so there the loss cannot be had from a file. What can be said is
how alike the heads' rotations are: the *overlap*, the mean of |diag(R_g^T R_h)| over pairs of heads, 1 where they are
the same and sqrt(2 / (pi d)) where they have nothing to do with each other.
"""

from __future__ import annotations

import math

import torch

from oscar_rotation.math.balanced import balance
from oscar_rotation.math.hadamard import bit_reversal_matrix, hadamard


def sharing_loss(transforms: torch.Tensor, sigma: torch.Tensor) -> float:
    """The relative increase of a layer's expected error if its heads shared one balanced transform; at least 0.

    Args:
        transforms: T of each kv head, [kv_heads, d, d], d as of :func:`oscar_rotation.math.hadamard.hadamard`.
        sigma: their singular values in descending order, [kv_heads, d], positive.
    """
    exact, d = transforms.double().cpu(), transforms.shape[-1]
    spread = hadamard(d) @ bit_reversal_matrix(d)
    common = spread.mT @ torch.diag_embed(sigma.double().cpu()) @ spread
    dual = torch.linalg.inv(exact).mT
    stored, reading = dual @ common @ dual.mT, exact @ common @ exact.mT
    size = stored.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    stored, reading = stored / size, reading * size
    shared = balance(stored.mean(0), reading.mean(0))
    lost = traces(shared.transform.mT @ stored @ shared.transform) * traces(shared.dual.mT @ reading @ shared.dual)
    own = sigma.double().cpu().sum(-1).square()
    return max(0.0, float(lost.sum() / own.sum()) - 1)


def traces(matrices: torch.Tensor) -> torch.Tensor:
    """[..., d, d] -> [...]."""
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def overlap(rotations: torch.Tensor) -> float:
    """Mean of |diag(R_g^T R_h)| over the pairs of a layer's heads, from 0 to 1; 1 for a single head.

    Args:
        rotations: orthogonal, [kv_heads, d, d].
    """
    exact = rotations.double()
    found = [(exact[g] * exact[g + 1 :]).sum(1).abs().mean(1) for g in range(len(exact) - 1)]
    return float(torch.cat(found).mean()) if found else 1.0


def unrelated_overlap(d: int) -> float:
    """What two random rotations of ``d`` channels overlap by: the mean size of an entry of a random unit vector.

    >>> round(unrelated_overlap(128), 3)
    0.071
    """
    return math.sqrt(2 / (math.pi * d))
