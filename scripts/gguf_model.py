"""A Llama model from a GGUF file, as a Hugging Face folder in BF16.

Reads with the ``gguf`` package, which SGLang brings, and writes config, tokenizer and safetensors; nothing but those
formats is needed. Covers what :mod:`real_model` fetches: dense Llama models whose tokenizer is a byte-level BPE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3
"""Token type of special tokens in a GGUF vocabulary."""


class GgufError(ValueError):
    """The file is no GGUF file, or holds a model that is not converted here."""


def tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor.

    >>> tensor_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'

    Raises:
        GgufError: a tensor that dense Llama models do not have.
    """
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in NAMES:
        return f"model.layers.{int(parts[1])}.{NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    raise GgufError(f"the tensor {name} is not one of a dense Llama model")


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection [heads * d, hidden] from pairs side by side, as llama.cpp rotates them, to
    first and second half of the head, as transformers does."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def convert(source: Path, folder: Path) -> None:
    """Write ``folder`` (which exists): config.json, generation_config.json, tokenizer files, model.safetensors in BF16.

    Raises:
        GgufError: not a GGUF file, not a dense Llama model, or a tokenizer that is no byte-level BPE.
        OSError: the file cannot be read or the folder not written.
    """
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise GgufError(f"{source} is not a GGUF file: {error}") from None
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if facts.get("general.architecture") != "llama":
        raise GgufError(f"{source} holds a model of architecture {facts.get('general.architecture')}; need llama")
    config = model_config(facts, {tensor.name for tensor in reader.tensors})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    state = {}
    for tensor in reader.tensors:
        name = tensor_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        projection = name.split(".")[-2]
        if projection in heads:
            weight = rotary_halves(weight, heads[projection])
        state[name] = weight.to(torch.bfloat16).contiguous()
    write_tokenizer(facts, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner reads


def model_config(facts: dict[str, Any], tensors: set[str]) -> dict[str, Any]:
    """config.json of a Llama model.

    Args:
        facts: metadata of the GGUF file.
        tensors: names of its tensors; without an output matrix the embedding is used for both.
    """
    width, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    head_dim = facts.get("llama.attention.key_length", width // heads)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 12),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", facts["tokenizer.ggml.eos_token_id"]),
    }


def write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template among them.

    Raises:
        GgufError: not a byte-level BPE that keeps digits apart ("smollm").
    """
    kind = (facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise GgufError(f"the tokenizer is of kind {kind}; need ('gpt2', 'smollm'), a byte-level BPE")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, of_kind in zip(tokens, kinds, strict=True) if of_kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts.get("tokenizer.ggml.padding_token_id", facts["tokenizer.ggml.eos_token_id"])],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
