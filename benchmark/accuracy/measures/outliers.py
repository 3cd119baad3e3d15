"""How hard a model's cache is to quantize."""

from __future__ import annotations

from typing import Any

import torch

from accuracy.calibration import Calibration
from oscar_rotation.math.balanced import gain
from oscar_rotation.math.covariance import KeyCovariance, QueryCovariance, ValueCovariance


def outlier_statistics(calibration: Calibration) -> list[dict[str, Any]]:
    """Per layer and side: ``channel_ratio`` (largest over median channel RMS), ``kurtosis`` of all elements,
    ``mean_share`` (energy of the mean vector of a head), ``norm_ratio`` (largest over median token norm), and
    ``balance``: what balancing leaves of the error that any rotation has
    (:func:`oscar_rotation.math.balanced.gain`)."""
    rows = []
    for layer, x in enumerate(calibration.layers):
        queries = calibration.covariance(layer, QueryCovariance).shared()
        row: dict[str, Any] = {}
        sides = (
            ("k", x.k, calibration.covariance(layer, KeyCovariance).shared(), queries),
            ("v", x.v, calibration.covariance(layer, ValueCovariance).shared(), calibration.readers[layer].mean(0)),
        )
        for side, y, stored, reading in sides:
            rms = y.square().mean(0).sqrt()
            norms = y.norm(dim=-1)
            centered = y - y.mean()
            kurtosis = centered.pow(4).mean() / centered.square().mean().square()
            row[side] = {
                "channel_ratio": float((rms.amax(-1) / rms.median(-1).values).mean()),
                "kurtosis": float(kurtosis),
                "mean_share": float(y.mean(0).square().sum() / y.square().sum(-1).mean(0).sum()),
                "norm_ratio": float(norms.amax() / norms.median()),
                "balance": gain(stored, reading),
            }
        rows.append(row)
    return rows


def common_direction(calibration: Calibration) -> list[float]:
    """Per layer the share of key energy in the two directions of least query energy (0 to 1)."""
    shares = []
    for layer in range(len(calibration.layers)):
        q = calibration.covariance(layer, QueryCovariance).shared()
        k = calibration.covariance(layer, KeyCovariance).shared()
        lowest = torch.linalg.eigh(q.double()).eigenvectors[:, :2]
        shares.append(float((lowest.mT @ k.double() @ lowest).trace() / k.trace()))
    return shares
