"""Which tensors a load has written: a checkpoint may hold some of them only, and SGLang takes it all the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class WatchedTensors:
    """Tensors of which one number each is NaN until they are written.

    A load writes a tensor whole, so the number tells. Nothing may compute with the tensors meanwhile.

    Args:
        tensors: floating point, not empty, in place in the model.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = [tensor[(0,) * tensor.ndim] for tensor in tensors]
        self._before = [place.clone() for place in self._places]
        for place in self._places:
            place.fill_(torch.nan)

    def written(self) -> list[bool]:
        """Which of them were written since; the others get their number back."""
        found = [not bool(place.isnan()) for place in self._places]
        for place, before, was in zip(self._places, self._before, found, strict=True):
            if not was:
                place.copy_(before)
        return found
