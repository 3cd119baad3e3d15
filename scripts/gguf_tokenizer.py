"""The tokenizer of a GGUF file, as the files that transformers and SGLang load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types of a GGUF vocabulary: those of text, special, added but shown in text, and names for rows of the
embedding that no text has."""
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class TokenizerError(ValueError):
    """The tokenizer is of a kind that is not converted here."""


def smollm(tokenizer: Tokenizer) -> None:
    """The words of GPT-2, each digit one of its own."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def qwen2(tokenizer: Tokenizer) -> None:
    """The words of Qwen2, composed characters."""
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )


KINDS: dict[str, Callable[[Tokenizer], None]] = {"smollm": smollm, "qwen2": qwen2}
"""How each kind of byte-level BPE cuts text into words, by its name in GGUF files."""


def byte_level(facts: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE.

    Raises:
        TokenizerError: it cuts words in a way that is none of ``KINDS``.
    """
    kind = facts.get("tokenizer.ggml.pre")
    if kind not in KINDS:
        raise TokenizerError(f"the tokenizer is of kind gpt2, {kind}; need {' or '.join(KINDS)}")
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(facts), merges=merges))
    KINDS[kind](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(facts: dict[str, Any]) -> Tokenizer:
    """A BPE of characters, which SentencePiece gives as scores: of two pieces that make one together, those are merged
    first whose whole has the highest. What has no piece is spelled in bytes."""
    known, scores = vocabulary(facts), facts["tokenizer.ggml.scores"]
    kinds = facts["tokenizer.ggml.token_type"]
    merges = [
        (-scores[i], known[piece[:at]], known[piece[at:]], piece[:at], piece[at:])
        for piece, i in known.items()
        if kinds[i] == NORMAL
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def vocabulary(facts: dict[str, Any]) -> dict[str, int]:
    """Ids of the tokens that a text can have."""
    kinds = facts["tokenizer.ggml.token_type"]
    return {token: i for i, token in enumerate(facts["tokenizer.ggml.tokens"]) if kinds[i] != UNUSED}


MODELS = {"gpt2": byte_level, "llama": sentencepiece}
"""Tokenizers by their names in GGUF files."""


def write_tokenizer(facts: dict[str, Any], context: int, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template among them.

    Args:
        facts: metadata of the GGUF file.
        context: length that the model takes, in tokens.
        folder: where the files go; exists.

    Raises:
        TokenizerError: not one of ``MODELS``, or see those.
    """
    bpe = facts.get("tokenizer.ggml.model")
    if bpe not in MODELS:
        raise TokenizerError(f"the tokenizer is of kind {bpe}; need {' or '.join(MODELS)}")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    tokenizer = MODELS[bpe](facts)
    added = [
        AddedToken(token, special=of_kind == CONTROL, normalized=False)
        for token, of_kind in zip(tokens, kinds, strict=True)
        if of_kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    ids = special_ids(facts)
    if facts.get("tokenizer.ggml.add_bos_token"):
        first = tokens[ids["bos_token"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, ids["bos_token"])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in ids.items()},
    }
    if "tokenizer.chat_template" in facts:  # not of a model that was trained on text alone
        config["chat_template"] = facts["tokenizer.chat_template"]
    unknown = facts.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None:
        config["unk_token"] = tokens[unknown]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def special_ids(facts: dict[str, Any]) -> dict[str, int]:
    """Ids of bos_token, eos_token and pad_token."""
    end = facts["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token": facts["tokenizer.ggml.bos_token_id"],
        "eos_token": end,
        "pad_token": facts.get("tokenizer.ggml.padding_token_id", end),
    }
