"""A small configuration of every class of models that is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "torch_dtype": "bfloat16",
}
HEADS: dict[str, Any] = {"hidden_size": 256}
"""For classes whose head_dim is hidden_size over heads."""
ALL_HEADS: dict[str, Any] = HEADS | {"num_key_value_heads": 4}
"""For classes without grouped queries."""
MOE: dict[str, Any] = {
    "num_experts": 2,  # all are asked: rounding must not choose between them
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
BAILING = HEADS | MOE
BAILING |= {"num_shared_experts": 1, "norm_topk_prob": True, "use_bias": False, "use_qkv_bias": False}
BAILING |= {"first_k_dense_replace": 1, "score_function": None, "embedding_dropout": 0.0, "use_qk_norm": False}
CHATGLM = HEADS | {"multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 64, "num_layers": 2}
CHATGLM |= {"ffn_hidden_size": 256, "padded_vocab_size": 2048, "seq_length": 4096, "layernorm_epsilon": 1e-5}
CHATGLM |= {"rmsnorm": True, "add_bias_linear": False, "add_qkv_bias": True, "post_layer_norm": True}
CHATGLM |= {"original_rope": True, "apply_residual_connection_post_layernorm": False}
CHATGLM |= {"fp32_residual_connection": False, "hidden_dropout": 0.0}
DEEPSEEK = {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True}
ERNIE = {"moe_num_experts": 2, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_interval": 1, "use_bias": False}
ERNIE |= {"moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_intermediate_size": 64}
QWEN = ALL_HEADS | {"kv_channels": 64, "layer_norm_epsilon": 1e-6, "seq_length": 4096, "rotary_emb_base": 10000.0}
GPT = ALL_HEADS | {"n_positions": 4096}
EXAONE = {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}
NO_WINDOW: dict[str, Any] = {"sliding_window": None}
BAICHUAN = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}

WINDOW: dict[str, Any] = {"sliding_window": 96, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
BOTH_ROPES: dict[str, Any] = {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}
DENSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
LAGUNA = WINDOW | MOE | DENSE | BOTH_ROPES
LAGUNA |= {"num_attention_heads_per_layer": [6, 4], "shared_expert_intermediate_size": 64, "gating": "per-head"}
STEP = WINDOW | {"num_attention_groups": 2, "rope_theta": [10000.0] * 2, "partial_rotary_factors": [1.0, 0.5]}
STEP |= {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 64}}
STEP |= {"moe_layers_enum": "1", "moe_num_experts": 2, "moe_top_k": 2, "moe_intermediate_size": 64}
STEP |= {"share_expert_dims": 64, "swiglu_limits": [0, 7.0], "swiglu_limits_shared": [0, 7.0]}
STEP |= {"use_head_wise_attn_gate": True, "use_moe_router_bias": True, "need_fp32_gate": True}
STEP |= {"moe_router_activation": "sigmoid", "moe_router_scaling_factor": 1.0}
STEP |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": [0]}

MIMO = MOE | {"head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128, "topk_method": "noaux_tc"}
MIMO |= {
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "hybrid_layer_pattern": [1, 0],
    "sliding_window": 96,
}
MIMO |= {"sliding_window_size": 96, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
MIMO |= {"attention_value_scale": 0.707, "layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.334, "n_group": 1}
MIMO |= {"rope_theta": 5000000.0, "swa_rope_theta": 10000.0, "moe_layer_freq": [0, 1], "scoring_func": "sigmoid"}
MIMO |= {"topk_group": 1, "norm_topk_prob": True, "n_shared_experts": None, "routed_scaling_factor": None}

NEMOTRON = {"hybrid_override_pattern": "M*-M*", "ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 32}
NEMOTRON |= {"n_groups": 2, "mamba_n_groups": 2, "chunk_size": 128, "num_hidden_layers": 5}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_chunk_size": 64}
FALCON_H1 = MAMBA | {"mamba_d_ssm": 256, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
FALCON_H1 |= {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2, "rope_theta": 10000.0}
FALCON_H1 |= {f"{name}_multiplier": 1.0 for name in ("key", "attention_in", "attention_out", "ssm_in", "ssm_out")}
GRANITE = HEADS | MOE | MAMBA | {"mamba_expand": 1, "attention_multiplier": 1.0, "shared_intermediate_size": 64}
GRANITE |= {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "attention"],
    "position_embedding_type": "nope",
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "AfmoeForCausalLM": ("afmoe", HEADS | MOE | WINDOW | {"num_dense_layers": 1, "num_shared_experts": 1}),
    "ApertusForCausalLM": ("apertus", {}),
    "ArceeForCausalLM": ("arcee", {}),
    "BaichuanForCausalLM": ("llama", BAICHUAN),
    "BailingMoEForCausalLM": ("llama", BAILING),
    "BailingMoeForCausalLM": ("llama", BAILING),
    "BailingMoeV2ForCausalLM": (
        "llama",
        BAILING | {"use_qk_norm": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    "ChatGLMModel": ("llama", CHATGLM),
    "Cohere2ForCausalLM": ("cohere2", HEADS | WINDOW | {"logit_scale": 1.0}),
    "Cohere2MoeForCausalLM": ("cohere2_moe", HEADS | MOE | WINDOW | {"logit_scale": 1.0}),
    "CohereForCausalLM": ("cohere", HEADS | {"logit_scale": 1.0}),
    "DeepseekForCausalLM": ("llama", HEADS | MOE | DEEPSEEK),
    "Ernie4_5_ForCausalLM": ("llama", {"use_bias": False}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", HEADS | ERNIE),
    "ExaoneForCausalLM": (
        "llama",
        HEADS | {"num_layers": 2, "layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    ),
    "FalconH1ForCausalLM": ("falcon_h1", HEADS | FALCON_H1),
    "GPT2LMHeadModel": ("gpt2", GPT),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", GPT | {"num_key_value_heads": 1, "multi_query": True}),
    "GPTJForCausalLM": ("gptj", GPT | {"rotary_dim": 32}),
    "Gemma2ForCausalLM": ("gemma2", {"query_pre_attn_scalar": 64}),
    "Gemma3ForCausalLM": ("gemma3_text", WINDOW | {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "GemmaForCausalLM": ("gemma", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", MOE | {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True}),
    "GraniteForCausalLM": ("granite", HEADS),
    "GraniteMoeForCausalLM": ("granitemoe", HEADS | MOE),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", GRANITE),
    "GraniteMoeSWAForCausalLM": ("granitemoe_swa", HEADS | MOE | WINDOW | {"attention_multiplier": 0.125}),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", HEADS | MOE | {"shared_intermediate_size": 64}),
    "GraniteSWAForCausalLM": ("granite_swa", HEADS | WINDOW | {"attention_multiplier": 0.125}),
    "HYV3ForCausalLM": ("hy_v3", MOE | {"route_norm": True}),
    "HYV4ForCausalLM": ("hy_v4", MOE),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", {}),
    "HunYuanMoEV1ForCausalLM": (
        "hunyuan_v1_moe",
        MOE | {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True},
    ),
    "IQuestCoderForCausalLM": ("llama", {}),
    "InternLM2ForCausalLM": ("llama", HEADS | {"bias": False}),
    "InternLM3ForCausalLM": ("llama", {}),
    "LagunaForCausalLM": ("laguna", LAGUNA),
    "LlamaForCausalLM": ("llama", {}),
    "MellumForCausalLM": ("mellum", MOE | WINDOW | DENSE | BOTH_ROPES),
    "MiMoForCausalLM": ("llama", HEADS | {"num_nextn_predict_layers": 1}),
    "MiMoV2FlashForCausalLM": ("llama", MIMO),
    "MiniCPMForCausalLM": ("llama", HEADS | {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 256}),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "MistralForCausalLM": ("mistral", NO_WINDOW),
    "MixtralForCausalLM": ("mixtral", HEADS | MOE | NO_WINDOW),
    "NemotronHForCausalLM": ("nemotron_h", NEMOTRON),
    "OPTForCausalLM": ("opt", ALL_HEADS | {"word_embed_proj_dim": 256, "ffn_dim": 256, "do_layer_norm_before": True}),
    "Olmo2ForCausalLM": ("olmo3", HEADS | WINDOW),
    "OlmoForCausalLM": ("olmo", ALL_HEADS),
    "OlmoeForCausalLM": ("olmoe", ALL_HEADS | MOE),
    "OrionForCausalLM": ("llama", HEADS),
    "PersimmonForCausalLM": ("persimmon", ALL_HEADS | {"partial_rotary_factor": 0.5}),
    "Phi3ForCausalLM": ("phi3", HEADS | NO_WINDOW),
    "PhiForCausalLM": ("phi", ALL_HEADS | {"partial_rotary_factor": 0.5}),
    "PhiMoEForCausalLM": ("phimoe", HEADS | MOE | NO_WINDOW),
    "QWenLMHeadModel": ("llama", QWEN | {"intermediate_size": 512}),
    "QuantMixtralForCausalLM": ("mixtral", HEADS | MOE | NO_WINDOW),
    "Qwen2ForCausalLM": ("qwen2", HEADS),
    "Qwen2MoeForCausalLM": ("qwen2_moe", HEADS | MOE | {"shared_expert_intermediate_size": 64}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", MOE),
    "SDARForCausalLM": ("qwen3", {}),
    "SDARMoeForCausalLM": ("qwen3_moe", MOE),
    "SarvamMoEForCausalLM": ("llama", BAILING | {"use_qk_norm": True}),
    "SolarForCausalLM": ("llama", {f"bskcn_{n}": [] for n in (1, 2, 3, 4)} | {"bskcn_tv": [0.9, 0.8]}),
    "Spark2_5ForCausalLM": ("spark2_5", WINDOW | BOTH_ROPES),
    "StableLmForCausalLM": ("stablelm", HEADS | {"partial_rotary_factor": 0.25}),
    "Starcoder2ForCausalLM": ("starcoder2", HEADS | NO_WINDOW),
    "Step3p5ForCausalLM": ("step3p5", STEP),
    "TeleFLMForCausalLM": ("llama", {"input_mult": 1.0, "output_mult": 1.0, "mup_scale_factor": 1.0, "use_mup": False}),
    "TorchNativeLlamaForCausalLM": ("llama", {}),
    "TorchNativePhi3ForCausalLM": ("phi3", HEADS | NO_WINDOW),
    "XverseForCausalLM": ("llama", HEADS),
    "XverseMoeForCausalLM": ("llama", HEADS | MOE | {"moe_top_k": 2, "num_shared_experts": 1}),
}
"""By class: a type of model that transformers knows, and what a configuration has besides ``COMMON``."""

AS_PUBLISHED = {
    "step3p5": "Step3p5Config", "nemotron_h": "NemotronHConfig", "falcon_h1": "FalconH1Config",
    "granitemoehybrid": "GraniteMoeHybridConfig",
}  # fmt: skip
"""Types of which transformers knows other configurations than those that were published with code of their own, and
SGLang's class of those."""


def save(name: str, folder: Path) -> Path:
    """Write the configuration of a class to ``folder`` and return it."""
    model_type, own = SHAPES[name]
    text = COMMON | own | {"model_type": model_type}
    if model_type not in AS_PUBLISHED:
        text = AutoConfig.for_model(model_type, **COMMON | own).to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    text |= {"architectures": [name]}
    if model_type in AS_PUBLISHED:
        text |= {"auto_map": {"AutoConfig": f"own_configuration.{AS_PUBLISHED[model_type]}"}}
        (folder / "own_configuration.py").write_text(f"from sglang.srt.configs import {AS_PUBLISHED[model_type]}\n")
    (folder / "config.json").write_text(json.dumps(text, default=str))
    return folder
