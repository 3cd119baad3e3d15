"""Needle retrieval by length and depth, on a cached prefix."""

from __future__ import annotations

from typing import Any

import torch

from accuracy.attention import prefill_then_decode
from accuracy.methods.base import Method
from accuracy.session import Session
from oscar_tools.evaluation.intervals import wilson
from reference_model.evaluate import Questions

PAGE, RECOMPUTED = 64, 256
DEPTHS = 4


class Retrieval:
    """Questions about documents of one length.

    The document is in the prefix cache but for the last 256 prompt tokens, which the server computes again; the
    answer is decoded. Greedy decoding gives the right answer exactly if every right token is the most likely one
    behind the right ones before it, so one teacher-forced pass decides.

    Args:
        model: the model.
        questions: all of one length.
        batch: questions at a time.
    """

    def __init__(self, model: Any, questions: Questions, batch: int) -> None:
        self.questions = questions
        prompt, answer = questions.prompts.shape[1], questions.answers.shape[1]
        prefix = max(0, prompt - RECOMPUTED) // PAGE * PAGE
        ids = torch.cat([questions.prompts, questions.answers], 1)
        schedule = prefill_then_decode(prompt + answer, prompt, prefix=prefix)
        # What comes before an answer's token says whether that is right.
        self.sessions = [Session(model, chunk, schedule, told=prompt - 1) for chunk in ids.split(batch)]

    def correct(self, method: Method) -> torch.Tensor:
        """bool [questions]: whether the whole answer is right."""
        size = self.questions.answers.shape[1]
        right = []
        for session in self.sessions:
            logits = session.run(method.view(session.schedule)).logits[:, :-1]
            right.append((logits.argmax(-1) == session.ids[:, -size:]).all(1).cpu())
        return torch.cat(right)

    def measure(self, method: Method) -> dict[str, Any]:
        """``accuracy`` with an interval and ``by_depth``, from the beginning of the document to its end."""
        right = self.correct(method)
        bins = (self.questions.depths * DEPTHS).long().clamp(max=DEPTHS - 1)
        by_depth = [right[bins == b].float().mean().item() if bool((bins == b).any()) else None for b in range(DEPTHS)]
        return {"accuracy": vars(wilson(int(right.sum()), len(right))), "by_depth": by_depth}
