"""The tokenizer of a GGUF file, as the files that transformers and SGLang load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Token types of a GGUF vocabulary: special, added but shown in text, and names for rows of the embedding that no text
has."""
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


def write_tokenizer(facts: dict[str, Any], context: int, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, the chat template among them.

    Args:
        facts: metadata of the GGUF file.
        context: length that the model takes, in tokens.
        folder: where the files go; exists.

    Raises:
        TokenizerError: not a byte-level BPE of one of ``KINDS``.
    """
    bpe, kind = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if bpe != "gpt2" or kind not in KINDS:
        raise TokenizerError(f"the tokenizer is of kind {bpe}, {kind}; need gpt2, {' or '.join(KINDS)}")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    KINDS[kind](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=of_kind == CONTROL, normalized=False)
        for token, of_kind in zip(tokens, kinds, strict=True)
        if of_kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = special_ids(facts)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in ids.items()},
        "chat_template": facts["tokenizer.chat_template"],
    }
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
