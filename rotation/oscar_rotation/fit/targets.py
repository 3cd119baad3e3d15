"""The targets that a fit can use, by name, and the methods that pair them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oscar_rotation.math.covariance import (
    CovarianceAccumulator,
    KeyCovariance,
    ProxyValueCovariance,
    QueryCovariance,
    ScoreValueCovariance,
    ValueCovariance,
)
from oscar_rotation.math.residual import ResidualCovariance


@dataclass(frozen=True)
class TargetInputs:
    """What a target may need to be built.

    Attributes:
        kv_heads, head_dim, value_head_dim: geometry of the layer, channels of keys and of values.
        device: where to accumulate.
        sm_scale: factor on the attention logits; None for 1/sqrt(head_dim).
        query_covariance: C_Q per kv head of the whole calibration set, for targets that ask for it.
        sinks: [q_heads], sink logits of the layer; None for a layer without.
    """

    kv_heads: int
    head_dim: int
    value_head_dim: int
    device: torch.device
    sm_scale: float | None = None
    query_covariance: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Target:
    """A covariance target.

    Attributes:
        make: builds an empty accumulator for one layer; None for "hadamard", which needs no data.
        needs_query_covariance: whether C_Q must be known before the first chunk, which costs a second pass.
    """

    make: Callable[[TargetInputs], CovarianceAccumulator] | None
    needs_query_covariance: bool = False


def _make_proxy(inputs: TargetInputs) -> CovarianceAccumulator:
    if inputs.query_covariance is None:
        raise ValueError("the proxy target needs the query covariance")
    return ProxyValueCovariance(inputs.query_covariance, inputs.value_head_dim, inputs.device)


DATA_FREE = "hadamard"
"""Target that fits nothing: the plain Hadamard rotation, whatever the composition."""

KEY_TARGETS: dict[str, Target] = {
    "qqt": Target(lambda x: QueryCovariance(x.kv_heads, x.head_dim, x.device)),
    "ktk": Target(lambda x: KeyCovariance(x.kv_heads, x.head_dim, x.device)),
    "uresidual": Target(lambda x: ResidualCovariance("k", x.kv_heads, x.head_dim, x.device)),
    DATA_FREE: Target(None),
}
"""Targets of keys: C_Q (the method's), K^T K, the quantizer's residual, and none."""

VALUE_TARGETS: dict[str, Target] = {
    "sst": Target(lambda x: ScoreValueCovariance(x.kv_heads, x.value_head_dim, x.device, x.sm_scale, x.sinks)),
    "proxy": Target(_make_proxy, needs_query_covariance=True),
    "vtv": Target(lambda x: ValueCovariance(x.kv_heads, x.value_head_dim, x.device)),
    "uresidual": Target(lambda x: ResidualCovariance("v", x.kv_heads, x.value_head_dim, x.device)),
    DATA_FREE: Target(None),
}
"""Targets of values: exact C_S (the method's), its diagonal stand-in, V^T V, the quantizer's residual, and none."""

METHODS: dict[str, tuple[str, str]] = {
    "qqt_sst": ("qqt", "sst"),
    "qqt": ("qqt", DATA_FREE),
    "sst": (DATA_FREE, "sst"),
    "ktk_vtv": ("ktk", "vtv"),
    "ktk": ("ktk", DATA_FREE),
    "vtv": (DATA_FREE, "vtv"),
    "hadamard": (DATA_FREE, DATA_FREE),
    "uresidual": ("uresidual", "uresidual"),
}
"""Method -> (key target, value target). A method of one target leaves the other side at Hadamard."""

DEFAULT_METHOD = "qqt_sst"
