"""A Llama, Qwen2 or Gemma 3 model from a GGUF file, as a Hugging Face folder in BF16.

Reads with the ``gguf`` package, which SGLang brings, and writes config, tokenizer and safetensors; nothing but those
formats is needed. Covers what :mod:`real_model` fetches: dense models whose tokenizer is a BPE, of bytes or as
SentencePiece has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from gguf_tokenizer import TokenizerError, special_ids, write_tokenizer

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
GEMMA3_NAMES = NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PIECE = 1 << 22
"""Elements that are converted at a time."""


@dataclass(frozen=True)
class Architecture:
    """What tells models apart.

    Attributes:
        name: of the class in transformers.
        kind: in config.json.
        side_by_side: whether llama.cpp rotates channels that lie side by side, for which it has reordered the rows of
            query and key projections; else halves of the head, as transformers does.
        config: entries of config.json that others do not have, from the file's own facts of the model.
        names: of a layer's tensors.
        added: what llama.cpp has added to the weights of norms.
    """

    name: str
    kind: str
    side_by_side: bool
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Mapping[str, str]
    added: float = 0.0


GEMMA3_PATTERN, GEMMA3_LOCAL_BASE = 6, 10000.0
"""Of so many layers the last has no window, and the base of the rotary embedding of the others; no file says so."""


def gemma3_config(own: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of Gemma 3."""
    kinds = ("full_attention", "sliding_attention")
    bases = (own["rope.freq_base"], GEMMA3_LOCAL_BASE)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": own["attention.key_length"],
        "sliding_window": own["attention.sliding_window"],
        "layer_types": [kinds[(i + 1) % GEMMA3_PATTERN > 0] for i in range(own["block_count"])],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in zip(kinds, bases, strict=True)
        },
        "rope_local_base_freq": GEMMA3_LOCAL_BASE,
        "attention_bias": False,
    }


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", True, lambda own: {"attention_bias": False, "mlp_bias": False}, NAMES
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", False, lambda own: {"use_sliding_window": False}, NAMES),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", False, gemma3_config, GEMMA3_NAMES, 1.0),
}
"""By their names in GGUF files."""


class GgufError(ValueError):
    """The file is no GGUF file, or holds a model that is not converted here."""


def tensor_name(name: str, names: Mapping[str, str] = NAMES) -> str:
    """The Hugging Face name of a GGUF tensor, by the names of a layer's tensors.

    >>> tensor_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'

    Raises:
        GgufError: a tensor that dense models do not have.
    """
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in names:
        return f"model.layers.{int(parts[1])}.{names[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    raise GgufError(f"the tensor {name} is not one of a dense model")


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection [heads * d, hidden] from pairs side by side, as llama.cpp rotates them, to
    first and second half of the head, as transformers does."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def convert(source: Path, folder: Path, tied: bool = False) -> None:
    """Write ``folder`` (which exists): config.json, generation_config.json, tokenizer files, model.safetensors in BF16.

    Args:
        source: the GGUF file.
        folder: where the model goes.
        tied: whether one matrix is embedding and output. Of two that the file then has, with bits of their own, the
            output's is taken: it is quantized with more. Without an output matrix a model is tied anyway.

    Raises:
        GgufError: not a GGUF file, or a model or a tokenizer that is not converted here.
        OSError: the file cannot be read or the folder not written.
    """
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise GgufError(f"{source} is not a GGUF file: {error}") from None
    facts = {name: field.contents() for name, field in reader.fields.items()}
    kind = facts.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise GgufError(f"{source} holds a model of architecture {kind}; need {' or '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    tensors = {tensor_name(tensor.name, architecture.names): tensor for tensor in reader.tensors}
    head = tensors.get("lm_head.weight")
    if tied and head is not None:
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    config = model_config(facts, tied or head is None)
    try:
        write_tokenizer(facts, config["max_position_embeddings"], folder)
    except TokenizerError as error:
        raise GgufError(f"{source}: {error}") from None
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if generation["pad_token_id"] != generation["eos_token_id"]:  # it ends a text, as the other ends a turn
        generation["eos_token_id"] = [generation["eos_token_id"], generation["pad_token_id"]]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    reordered = heads if architecture.side_by_side else {}
    write_weights(tensors, reordered, architecture.added, folder / "model.safetensors")


def write_weights(tensors: dict[str, ReaderTensor], reordered: dict[str, int], added: float, path: Path) -> None:
    """A safetensors file in BF16, a piece at a time, so that memory holds no more than one.

    Args:
        tensors: by their Hugging Face names.
        reordered: projections whose rows lie pair by pair, with their numbers of heads.
        added: what norms have too much.
        path: of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants its data aligned
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            heads = reordered.get(name.split(".")[-2])
            # One block of rows at a time; rows that change places need all of theirs.
            rows = len(tensor.data) if heads else max(1, PIECE * len(tensor.data) // int(tensor.n_elements))
            for data in range(0, len(tensor.data), rows):
                piece = torch.from_numpy(
                    dequantize(tensor.data[data : data + rows], tensor.tensor_type).astype("float32")
                )
                piece = rotary_halves(piece, heads) if heads else piece
                piece = piece - added if name.endswith("norm.weight") else piece
                out.write(piece.to(torch.bfloat16).contiguous().view(torch.int16).numpy().data)


def model_config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of a model.

    Args:
        facts: metadata of the GGUF file.
        tied: whether one matrix is embedding and output.
    """
    kind = facts["general.architecture"]
    own = {name.removeprefix(f"{kind}."): fact for name, fact in facts.items() if name.startswith(f"{kind}.")}
    width, heads = own["embedding_length"], own["attention.head_count"]
    return {
        "architectures": [ARCHITECTURES[kind].name],
        "model_type": ARCHITECTURES[kind].kind,
        "dtype": "bfloat16",
        "transformers_version": "5.0.0",  # without one it warns of a tokenizer that needs mending
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own.get("attention.key_length", width // heads),
        "max_position_embeddings": own["context_length"],
        "rope_theta": own["rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": own["rope.freq_base"]},
        "rms_norm_eps": round(own["attention.layer_norm_rms_epsilon"], 12),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        **{f"{name}_id": i for name, i in special_ids(facts).items()},
        **ARCHITECTURES[kind].config(own),
    }
