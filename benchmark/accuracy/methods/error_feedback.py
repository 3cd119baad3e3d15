"""What ``plus`` and ``focus`` leave on the table: codes chosen one channel after the other, each making up for those
before it."""

from __future__ import annotations

from functools import partial

import torch

from accuracy.calibration import Calibration
from accuracy.focus_side import FocusOptions
from accuracy.methods.focus import PLUS_VALUES, Focus
from accuracy.methods.plus import Plus
from oscar_kernels.codec import clip, dequantize, fitted_parameters, quantize
from oscar_rotation.math.covariance import QueryCovariance

DAMPING = 0.01
"""Added to the diagonal of the metric, relative to its mean: keeps feedback from chasing what no query reads."""


class ErrorFeedback(Plus):
    """``plus`` whose keys are rounded with error feedback (as GPTQ rounds weights): same rows, same attention.

    Codes start from the codec's scales and zero points, which are fitted to the codes afterwards, as in ``plus``.
    Channels are rounded in order, and the error of each is spread over the
    later ones so that queries see least of it: with M the second moment of the queries that read the row and U the
    upper Cholesky factor of its inverse, channel i's error e adds -e / U_ii U_i,j to channel j > i. The server does not
    do this: it makes the store kernel sequential in the channels.
    """

    def __init__(self) -> None:
        super().__init__(label="error feedback (not served)", table="plus")

    def fit(self, calibration: Calibration) -> None:
        """Transforms of ``plus`` and a triangular factor per layer."""
        super().fit(calibration)
        self.factors = []
        for layer in range(len(calibration.layers)):
            back = self.key.back[layer].double().cpu()
            metric = back @ calibration.covariance(layer, QueryCovariance).shared().cpu() @ back.mT
            self.factors.append(factor_of(metric).to(calibration.device))

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        y = self.key.into(layer, k)
        return self.key.out(layer, fed_rows(y, self.group, self.k_clip, self.k_gain, self.factors[layer]))


class FocusFeedback(Focus):
    """``focus`` whose keys are rounded in the same way, with a factor for every kv head."""

    def fit(self, calibration: Calibration) -> None:
        """Transforms of ``focus`` and triangular factors."""
        super().fit(calibration)
        self.factors = []
        for index, layer in enumerate(self.layers):
            back = layer.key.back.double().cpu()
            metric = back @ calibration.covariance(index, QueryCovariance).per_head().cpu() @ back.mT
            self.factors.append(factor_of(metric).to(calibration.device))

    def keys(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """See :class:`accuracy.methods.base.Method`."""
        tables, side = self.rotary(k.shape[2]), self.layers[layer].key
        y = side.into(k.float(), tables)
        return side.out(fed_rows(y, self.options.group, side.clip, side.gain, self.factors[layer]), tables)


def factor_of(metric: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of a damped metric, float32 [..., d, d]."""
    d = metric.shape[-1]
    mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    damped = metric + DAMPING * mean * torch.eye(d, dtype=metric.dtype)
    return torch.linalg.cholesky(torch.linalg.inv(damped), upper=True).float()


def fed_rows(y: torch.Tensor, group: int, ratio: float, gain: float, factor: torch.Tensor) -> torch.Tensor:
    """What rows give back whose codes were chosen with feedback: y [batch, heads, n, d], factor [d, d] or by head."""
    group = min(group, y.shape[-1])
    _, scale, zero = quantize(clip(y, ratio), group)
    wide_scale, wide_zero = (x.float().repeat_interleave(group, -1) for x in (scale, zero))
    if factor.ndim == 2:
        factor = factor.expand(y.shape[1], -1, -1)
    fed = feed_back(y, wide_scale, wide_zero, factor[:, None])
    codes = (fed / wide_scale + wide_zero).round().to(torch.uint8)
    return dequantize(codes, *fitted_parameters(y, codes, scale, gain))


def feed_back(y: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Round with error feedback.

    Args:
        y: [..., d].
        scale, zero: of each channel, [..., d].
        factor: upper Cholesky factor of the inverse metric, [..., d, d].

    Returns:
        float32 [..., d]: scale * (code - zero) with codes in 0..3.
    """
    rest, out = y.clone(), torch.empty_like(y)
    for i in range(y.shape[-1]):
        code = (rest[..., i] / scale[..., i] + zero[..., i] + 0.5).floor().clamp(0, 3)
        out[..., i] = scale[..., i] * (code - zero[..., i])
        error = (rest[..., i] - out[..., i]) / factor[..., i, i]
        rest[..., i + 1 :] -= error[..., None] * factor[..., i, i + 1 :]
    return out


METHODS = [
    ErrorFeedback,
    partial(
        FocusFeedback,
        label="values as in plus, calibrated on all kinds, error feedback (not served)",
        options=FocusOptions(**PLUS_VALUES),
        table="domains",
        domain="broad",
    ),
]
