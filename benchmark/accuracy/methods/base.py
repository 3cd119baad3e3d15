"""The interface of a method, and what methods that keep whole rows have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from accuracy.attention import CacheView, Schedule, sliding_window
from accuracy.calibration import Calibration
from accuracy.quantizers import SIXTEEN
from oscar_rotation.math.fitted_rows import coded

SINK, RECENT = 64, 256


class Method:
    """A format of the cache.

    Attributes:
        name: unique, as in the report.
        source: paper or public description.
        table: which table of the report it belongs to.
        sink, recent: tokens read in 16 bits.
        by_token: whether what is read of a token depends on this token alone, so that it may be quantized by itself.
        facts: about the fit, for the results.
    """

    name: str
    source: str
    table: str = "methods"
    sink: int = SINK
    recent: int = RECENT
    by_token: ClassVar[bool] = False
    facts: Mapping[str, Any] = MappingProxyType({})

    def fit(self, calibration: Calibration) -> None:
        """Learn from calibration data; methods without data learn the geometry only."""

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Keys as the cache gives them back: [batch, kv_heads, n, d], after RoPE -> float32 of the same shape."""
        raise NotImplementedError

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """Values as the cache gives them back."""
        raise NotImplementedError

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """Bits per element of a quantized key and of a quantized value, metadata included."""
        raise NotImplementedError

    def exact_from(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        """First exact position for keys and for values, by query: int64 [n] each."""
        window = sliding_window(schedule, self.recent)
        return window, window

    def bits_per_element(self, head_dim: int, context: int = 131072) -> float:
        """Mean bits of a cached element at a context length, 16-bit windows included (paper, section 5.1)."""
        stored = sum(self.stored_bits(head_dim)) / 2
        windows = min(context, self.sink + self.recent)
        return stored + (SIXTEEN - stored) * windows / context

    def view(self, schedule: Schedule) -> CacheView:
        """How attention reads a sequence through this method."""
        keys_from, values_from = self.exact_from(schedule)
        return CacheView(self.keys, self.values, self.sink, keys_from, values_from, by_token=self.by_token)


@dataclass
class Transforms:
    """Linear maps of one side. Shapes [layers, d, d]; ``center`` [layers, kv_heads, d] in the model's basis or None.

    What is stored is (x - center) @ forward; ``back`` undoes ``forward``.
    """

    forward: torch.Tensor
    back: torch.Tensor
    center: torch.Tensor | None = None

    @classmethod
    def rotations(cls, rotations: torch.Tensor) -> Transforms:
        """From orthogonal matrices."""
        return cls(rotations, rotations.mT.contiguous())

    def into(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """[batch, kv_heads, n, d] -> the basis of the cache, float32."""
        y = x.float() if self.center is None else x.float() - self.center[layer][:, None]
        return y @ self.forward[layer]

    def out(self, layer: int, y: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`into`."""
        x = y @ self.back[layer]
        return x if self.center is None else x + self.center[layer][:, None]


def shared(matrix: torch.Tensor, calibration: Calibration) -> Transforms:
    """The same rotation in every layer."""
    return Transforms.rotations(matrix.float().to(calibration.device).expand(len(calibration.layers), -1, -1))


class RowMethod(Method):
    """Rows of 2-bit codes as the server stores them, behind a linear map; fit sets ``key`` and ``value``."""

    group: int
    k_clip: float = 0.96
    v_clip: float = 0.92
    k_gain: float = 0.0
    v_gain: float = 0.0
    key: Transforms
    value: Transforms
    by_token = True

    def coded(self, y: torch.Tensor, ratio: float, gain: float, levels: int = 4) -> torch.Tensor:
        """What a stored row gives back, in its own basis."""
        return coded(y, self.group, ratio, gain, levels)

    def read_keys(self, layer: int, k: torch.Tensor, row: tuple[float, float], levels: int) -> torch.Tensor:
        """Keys as the cache gives them back: rows with this clip ratio and gain, of so many levels."""
        return self.key.out(layer, self.coded(self.key.into(layer, k), *row, levels))

    def read_values(self, layer: int, v: torch.Tensor, row: tuple[float, float], levels: int) -> torch.Tensor:
        """The same of values."""
        return self.value.out(layer, self.coded(self.value.into(layer, v), *row, levels))

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return self.read_keys(layer, k, (self.k_clip, self.k_gain), 4)

    def values(self, layer: int, v: torch.Tensor) -> torch.Tensor:
        """See :class:`Method`."""
        return self.read_values(layer, v, (self.v_clip, self.v_gain), 4)

    def stored_bits(self, head_dim: int) -> tuple[float, float]:
        """See :class:`Method`; counted from the server's row layout."""
        from oscar_kernels.layout import RowLayout

        bits = RowLayout(1, head_dim, min(self.group, head_dim)).bits_per_element
        return bits, bits
