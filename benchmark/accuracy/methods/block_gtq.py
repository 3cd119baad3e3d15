"""Block-GTQ: TurboQuant whose bits go to the rotary pairs that queries and keys are large in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch

from accuracy.calibration import Calibration
from accuracy.methods.base import Method
from accuracy.methods.turboquant import SEED, haar
from accuracy.quantizers import SIXTEEN, lloyd_max_round

LEAST_BITS, MOST_BITS = 1, 8


def allocate(energy: torch.Tensor, mean_bits: float) -> torch.Tensor:
    """Whole bits per element of every rotary pair, with the least sum of energy / 4^bits.

    One bit after the other goes to the pair whose share of that sum it lowers most, which is optimal: the gains of a
    pair shrink from bit to bit.

    Args:
        energy: [pairs], not negative.
        mean_bits: budget, from :data:`LEAST_BITS` to :data:`MOST_BITS`.

    Returns:
        int64 [pairs], :data:`LEAST_BITS` to :data:`MOST_BITS`.

    Raises:
        ValueError: a budget outside of that range.
    """
    if not LEAST_BITS <= mean_bits <= MOST_BITS:
        raise ValueError(f"a mean of {mean_bits} bits is outside {LEAST_BITS} to {MOST_BITS}")
    pairs = len(energy)
    gains = energy.double().cpu()[:, None] / 4.0 ** torch.arange(LEAST_BITS, MOST_BITS)
    chosen = gains.flatten().sort(descending=True, stable=True).indices[: int(pairs * mean_bits) - LEAST_BITS * pairs]
    return LEAST_BITS + torch.bincount(chosen // gains.shape[1], minlength=pairs)


def pair_energy(x: torch.Tensor) -> torch.Tensor:
    """Mean squared length of every rotary pair (i, d/2 + i); the rotary embedding does not change it.

    Args:
        x: [rows, d].

    Returns:
        [d/2].
    """
    return x.float().square().mean(0).unflatten(0, (2, -1)).sum(0)


@cache
def rotation(width: int, bits: int) -> torch.Tensor:
    """The random rotation of a group of ``width`` channels."""
    return haar(width, SEED + bits)


@dataclass(frozen=True)
class Group:
    """Channels with one bit width, and the rotation of their vectors, [width, width]."""

    channels: torch.Tensor
    bits: int
    rotation: torch.Tensor


def read_back(x: torch.Tensor, groups: list[Group]) -> torch.Tensor:
    """Each group by Lloyd-Max levels of its direction behind a rotation, scaled to its float16 norm: [..., d]."""
    out = torch.empty_like(x, dtype=torch.float32)
    for group in groups:
        part = x[..., group.channels].float()
        norm = part.norm(dim=-1, keepdim=True).half().float()
        levels = lloyd_max_round(part / norm.clamp_min(1e-8) @ group.rotation * len(group.channels) ** 0.5, group.bits)
        out[..., group.channels] = norm * levels / levels.norm(dim=-1, keepdim=True) @ group.rotation.T
    return out


class BlockGtq(Method):
    """Keys: per layer and kv head, bits of each rotary pair by its energy, half that of the queries and half that of
    the keys; pairs of the same bits are one vector for TurboQuant's Q_mse, with a norm of their own. Values: Q_mse.

    Assumed: norms in float16; what is read back is scaled to them exactly; the energies are those behind the rotary
    embedding, which they do not depend on. Published with and without windows; here with none, or with those of the
    server.
    """

    source = "Liang et al. 2026 (arXiv 2606.24033); github.com/JIA-Lab-research/blockgtq"

    def __init__(self, key_bits: int, value_bits: int, windows: bool = False) -> None:
        self.key_bits, self.value_bits = key_bits, value_bits
        self.name = f"Block-GTQ K{key_bits}V{value_bits}" + (", windows" if windows else "")
        if not windows:
            self.sink = self.recent = 0

    def fit(self, calibration: Calibration) -> None:
        """Groups of every kv head of every layer."""
        self.key_groups = [
            [self._groups(q.flatten(0, 1), k) for q, k in zip(heads, x.k.unbind(1), strict=True)]
            for x in calibration.layers
            for heads in [x.q.unflatten(1, (calibration.kv_heads, -1)).unbind(1)]
        ]
        d, device = calibration.head_dim, calibration.device
        matrix = rotation(d, self.value_bits).to(device)
        self.value_group = Group(torch.arange(d, device=device), self.value_bits, matrix)

    def _groups(self, q: torch.Tensor, k: torch.Tensor) -> list[Group]:
        bits = allocate((pair_energy(q) + pair_energy(k)) / 2, self.key_bits)
        both = torch.cat([bits, bits])
        found = []
        for width in bits.unique().tolist():
            channels = (both == width).nonzero().flatten()
            matrix = rotation(len(channels), width)
            found.append(Group(channels.to(k.device), width, matrix.to(k.device)))
        return found

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        heads = zip(k.unbind(1), self.key_groups[layer], strict=True)
        return torch.stack([read_back(x, groups) for x, groups in heads], 1)

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return read_back(v, [self.value_group])

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Budget and norms; how many of those a key has, the mean over heads, is known once it is fitted."""
        counts = [len(groups) for layer in self.key_groups for groups in layer]
        norms = sum(counts) / len(counts)
        return self.key_bits + norms * SIXTEEN / head_dim, self.value_bits + SIXTEEN / head_dim


METHODS = [partial(BlockGtq, 2, 2), partial(BlockGtq, 3, 2), partial(BlockGtq, 2, 2, windows=True)]
