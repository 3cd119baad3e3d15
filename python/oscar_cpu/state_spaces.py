"""Mamba2 on a machine without a GPU, in the place of Triton kernels and of a convolution that only GPUs have."""

from __future__ import annotations

import sys
from typing import Any

MIXER = "sglang.srt.layers.attention.mamba.mamba"


def before_backend(self: Any, *args: Any, **kwargs: Any) -> None:
    """Put the stand-in's operators in the mixer's place for them, before its backend is made.

    Attached where SGLANG_USE_CPU_ENGINE=1 and nowhere else; a machine with SGLang's own kernel package has none of them
    in it and keeps what it has.
    """
    try:
        from sgl_kernel import convolution, state_space
    except ImportError:
        return
    mixer: Any = sys.modules[MIXER]
    for kind in ("", "_triton"):
        setattr(mixer, f"causal_conv1d_fn{kind}", convolution.causal_conv1d_fn_cpu)
        setattr(mixer, f"causal_conv1d_update{kind}", convolution.causal_conv1d_update_cpu)
    mixer.mamba_chunk_scan_combined = state_space.mamba_chunk_scan_combined
    mixer.selective_state_update = state_space.selective_state_update
