"""Memory in units of which an owner has whole ones: rings, sink blocks, rows of history, states, pages of the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

MOST_COPIED = 64 << 20
"""Bytes that are on their way at once on one device: the memory account has no room for windows of all requests."""


class Units:
    """Args:
    groups: tensors [pieces, count, ...], of any sizes behind; a unit is one index of dimension 1 of all of them.
    """

    def __init__(self, groups: Sequence[torch.Tensor]) -> None:
        self.groups = [group for group in groups if group.numel()]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return sum(group[:, 0].nbytes for group in self.groups)

    def read(self, of: torch.Tensor) -> list[torch.Tensor]:
        """Copies of units, [pieces, units, ...] by group; ``of`` int64 [units] on the device."""
        return [group.index_select(1, of) for group in self.groups]

    def write(self, to: torch.Tensor, data: Sequence[torch.Tensor]) -> None:
        """Overwrite units ``to`` with what :meth:`read` gave, which may lie on another device."""
        for group, new in zip(self.groups, data, strict=True):
            group.index_copy_(1, to, new.to(group.device))

    def copy(self, source: Units, of: torch.Tensor, to: torch.Tensor) -> None:
        """Overwrite units ``to`` with units ``of`` of others of the same sizes, none of which is among ``to``.

        Args:
            source: the others, on this device or another.
            of, to: int64 [units] each; on the device, or on the host where there are two.
        """
        for target, group in zip(self.groups, source.groups, strict=True):
            if target.device != group.device:
                for there, here in zip(to.tolist(), of.tolist(), strict=True):
                    target[:, there].copy_(group[:, here], non_blocking=True)
                continue
            at_once = max(1, MOST_COPIED // group[:, 0].nbytes)
            for some, others in zip(of.split(at_once), to.split(at_once), strict=True):
                target.index_copy_(1, others, group.index_select(1, some))

    def digest(self, of: torch.Tensor) -> str:
        """XXH3 of 128 bits, in hex, of the bytes of some units in this order."""
        state = xxhash.xxh3_128()
        for data in self.read(of):
            state.update(data.cpu().contiguous().view(torch.uint8).numpy().data)
        return state.hexdigest()
