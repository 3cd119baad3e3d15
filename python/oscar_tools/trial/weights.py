"""Random weights under which attention matters: those of ``--load-format dummy`` leave next to nothing of it."""

from __future__ import annotations

import zlib
from typing import Any

import torch

GAIN = 0.9
"""Standard deviation of what a matrix makes of numbers of 1: greedy choices then depend on all tokens before."""


@torch.no_grad()
def fill(model: Any, *args: Any, **kwargs: Any) -> None:
    """Write random weights, in the place of SGLang's ``initialize_dummy_weights``. Each depends on its name alone.

    Args:
        model: a module whose norms are as they were constructed, ones or zeros; it is written.
    """
    for name, parameter in model.state_dict().items():
        if not torch.is_floating_point(parameter):
            continue
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if name.endswith("A_log"):  # states that forget slowly
            new = -3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(7))
        elif name.endswith(".A"):  # the same, as SGLang's Mamba2 has it
            new = -(-3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(7))).exp()
        elif parameter.dim() >= 2:
            new = GAIN / parameter.shape[-1] ** 0.5 * noise
        elif name.endswith("sinks"):  # as strong as the logits of some ten tokens; SGLang leaves them unwritten
            new = 2 + noise
        elif name.endswith("bias") or not bool(torch.isfinite(parameter).all()):
            new = 0.02 * noise
        elif bool((parameter == 1).all()) or bool((parameter == 0).all()):
            new = parameter.float().cpu() + 0.2 * noise
        else:  # computed by the class, like frequencies
            continue
        parameter.copy_(new)
