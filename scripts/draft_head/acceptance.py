"""Tokens per step of verification that a head would give, counted without a server.

The target answers greedily; the head drafts behind every token of the answer. A step of verification keeps the drafts
that begin as the answer does and one token more, and the next step begins behind them, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_head.head import DraftHead
from draft_head.prompts import KINDS, Prompt
from draft_head.target import Target


@torch.no_grad()
def right_drafts(head: DraftHead, target: Target, ids: list[int], steps: int) -> list[int]:
    """For every chain of a text, how many of its drafts are right before the first wrong one.

    Args:
        head: on the target's device.
        target: whose text it is.
        ids: the text.
        steps: drafts of a chain.

    Returns:
        for chain t, which drafts tokens t + 2 and on, 0 to ``steps``; ``len(ids) - steps - 1`` chains.
    """
    text = torch.tensor([ids], device=target.device)
    handed = target.read(text)
    logits = head(handed.embeddings, handed.features, steps)
    count = len(ids) - steps - 1
    hits = [one[0, :count].argmax(-1) == text[0, 2 + step : 2 + step + count] for step, one in enumerate(logits)]
    return torch.stack(hits).int().cumprod(0).sum(0).tolist()


def steps_of_verification(right: Sequence[int], prompt: int, tokens: int) -> int:
    """Steps until ``tokens`` tokens are out; the first of them comes with the prompt.

    >>> steps_of_verification([0, 0, 3, 0, 0, 0, 1, 0], prompt=3, tokens=7)
    2

    Args:
        right: of :func:`right_drafts`, for prompt and answer.
        prompt: tokens of the prompt.
        tokens: of the answer.
    """
    produced, steps = 1, 0
    while produced < tokens:
        produced += 1 + right[prompt - 2 + produced]
        steps += 1
    return steps


def tokens_per_step(
    heads: Sequence[DraftHead], target: Target, prompts: Sequence[Prompt], tokens: int, steps: int
) -> list[dict[str, float]]:
    """Tokens per step of verification for every head, by kind of prompt and over ``all``.

    Args:
        heads: to judge.
        target: answers once for all of them.
        prompts: what it is asked.
        tokens: of an answer.
        steps: drafts of a step.
    """
    counts = [dict.fromkeys(KINDS, 0) for _ in heads]
    for prompt in prompts:
        # Drafts behind the last tokens that count are compared too, so the target goes on a little.
        text = prompt.ids + target.answer(prompt.ids, tokens + steps + 1)
        for head, count in zip(heads, counts, strict=True):
            right = right_drafts(head, target, text, steps)
            count[prompt.kind] += steps_of_verification(right, len(prompt.ids), tokens)
    asked = {kind: sum(prompt.kind == kind for prompt in prompts) for kind in KINDS}
    found = []
    for count in counts:
        by_kind = {kind: tokens * asked[kind] / count[kind] for kind in KINDS if asked[kind]}
        found.append(by_kind | {"all": tokens * len(prompts) / sum(count.values())})
    return found
