"""Products of BF16 matrices on a CPU that has no instructions for them.

PyTorch multiplies them number by number there, ten to forty times as slowly as float32, in which it adds up as well.
So they are multiplied in float32 and rounded once, as before.
"""

from __future__ import annotations

import torch
from torch.nn import functional

FEW = 4
"""Rows below which converting a weight costs more than it saves."""
_linear, _matmul = functional.linear, torch.matmul


def _slow(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype == torch.bfloat16 and x.numel() >= FEW * x.shape[-1]


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As PyTorch's: input [..., n], weight [m, n] and bias [m] to [..., m]."""
    if not _slow(input, weight):
        return _linear(input, weight, bias)
    return _linear(input.float(), weight.float(), None if bias is None else bias.float()).bfloat16()


def matmul(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """As PyTorch's: input [..., n, k] and other [..., k, m] to [..., n, m]."""
    if out is not None or not _slow(input, other):
        return _matmul(input, other, out=out)
    return _matmul(input.float(), other.float()).bfloat16()


def install() -> None:
    """Put both in the place of PyTorch's, where the CPU has no such instructions."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for own, name in ((linear, "aten::linear"), (matmul, "aten::matmul")):  # in scripts, too
        torch.jit._builtins._register_builtin(own, name)
    setattr(functional, "linear", linear)  # noqa: B010 - type checkers know another signature
    setattr(torch, "matmul", matmul)  # noqa: B010
