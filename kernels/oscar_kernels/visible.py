"""Which new tokens a new token may attend to: one 64-bit word per token.

In verification of speculative decoding a request has several new tokens at once, the last accepted one and its drafts.
They form a tree, and a token attends to its ancestors in it and to itself. Bit ``j`` of the word of token ``i`` says
that ``i`` sees ``j``. Chains are the special case of a causal mask.
"""

from __future__ import annotations

import torch

MOST_TOKENS = 64
"""New tokens of a request at most: bits of a word."""


def words_of(mask: torch.Tensor) -> torch.Tensor:
    """Words of a mask.

    Args:
        mask: bool [batch, tokens, tokens]; entry (i, j) says that token i sees token j.

    Returns:
        int64 [batch, tokens].

    Raises:
        ValueError: there are more tokens than a word has bits.
    """
    _check(mask.shape[-1])
    bits = torch.arange(mask.shape[-1], device=mask.device)
    # No bit is set twice, so the sum is the union; bit 63 makes it negative.
    return (mask.long() << bits).sum(-1)


def causal_words(tokens: int, device: torch.device | str) -> torch.Tensor:
    """Words of a chain, in which a token sees those before it: int64 [tokens].

    Raises:
        ValueError: there are more tokens than a word has bits.
    """
    _check(tokens)
    return words_of(torch.ones(1, tokens, tokens, dtype=torch.bool, device=device).tril())[0]


def mask_of(words: torch.Tensor) -> torch.Tensor:
    """The mask of words int64 [..., tokens]: bool [..., tokens, tokens]."""
    bits = torch.arange(words.shape[-1], device=words.device)
    return (words[..., None] >> bits & 1).bool()


def _check(tokens: int) -> None:
    if tokens > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} new tokens per request, got {tokens}")
