"""Operators that SGLang looks up in torch instead of importing them."""

from __future__ import annotations

import torch

from sgl_kernel import delta_rule, gated_layers

OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
"""Where they live, as long as this module does."""

for _schema, _function in (
    ("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)", delta_rule.gates),
    (
        "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, "
        "Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel=True, float softplus_beta=1.0, float softplus_threshold=20.0, bool is_kda=False, "
        "bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None, "
        "Tensor? intermediate_state_indices=None, int cache_steps=1, Tensor? retrieve_parent_token=None) -> Tensor",
        delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
    ),
    (
        "fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate, bool inplace=True) -> Tensor(a!)",
        gated_layers.fused_sigmoid_mul_cpu,
    ),
    (
        "fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor",
        gated_layers.fused_rmsnorm_gated_cpu,
    ),
    (
        "fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
        "-> (Tensor, Tensor)",
        gated_layers.fused_qk_gemma_rmsnorm_cpu,
    ),
    (
        "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, "
        "int head_dim, int num_q_heads) -> (Tensor, Tensor, Tensor)",
        gated_layers.fused_qk_gemma_rmsnorm_with_gate_cpu,
    ),
    (
        "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor mixed_qkvz, Tensor mixed_ba, int k_heads, int heads, "
        "int k_dim, int v_dim) -> (Tensor, Tensor, Tensor, Tensor)",
        gated_layers.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    ),
):
    OPERATORS.define(_schema)
    OPERATORS.impl(_schema.partition("(")[0], _function, "CPU")
