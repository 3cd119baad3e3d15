"""Linear attention: what SGLang imports by name."""

from sgl_kernel.convolution import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from sgl_kernel.delta_rule import chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
