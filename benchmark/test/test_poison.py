"""Poison of the soak: one embedding is NaN and nothing else, and what is wrong with an answer is noted."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from poison import CLEAR, EMBEDDING, HEAD, TEXT, TOKEN, PoisonClient, common, poisoned_copy

MODEL = Path(__file__).parents[2] / "models" / "reference"
REFUSED = '500: {"error": "the model\'s output is not a number (NaN)"}'


class Told(PoisonClient):
    """Is told answers instead of asking for them."""

    def __init__(self, answer: Any) -> None:
        super().__init__(None, "", None, 0, 500, MODEL, every=2)  # type: ignore[arg-type]
        self.answer = answer

    async def generate(self, prompt: str, **body: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def answer(*tokens: tuple[float | None, int]) -> dict[str, Any]:
    top = [[token, (-9.0, 0)] for token in tokens]
    meta = {"output_token_logprobs": tokens, "output_top_logprobs": top}
    counts = {"cached_tokens": 0, "prompt_tokens": 1, "completion_tokens": len(tokens), "num_retractions": 0}
    return {"meta_info": meta | counts}


def test_one_embedding_is_nan(tmp_path: Path) -> None:
    """Logits of the copy are those of the model, whose embeddings are its head."""
    before, after = (load_file(f / "model.safetensors") for f in (MODEL, poisoned_copy(MODEL, tmp_path / "copy")))
    assert torch.equal(after.pop(HEAD), before[EMBEDDING])
    assert after[EMBEDDING][TOKEN].isnan().all()
    after[EMBEDDING][TOKEN] = before[EMBEDDING][TOKEN]
    assert all(torch.equal(after[name], before[name]) for name in before | after)


def test_nobody_else_says_the_token() -> None:
    client = Told(None)
    assert client.tokenizer.encode(TEXT).ids == [TOKEN]
    assert all(TOKEN not in client.tokenizer.encode(prompt).ids for prompt in client.prompts)


def test_ends_of_poisoned_requests() -> None:
    prompt = f"x{TEXT}y"
    nan, numbers = answer(*[(None, 0)] * 7), answer(*[(-0.1, 5)] * 7)
    client = Told(None)
    for client.answer in (RuntimeError(REFUSED), nan, numbers):
        asyncio.run(client.poison(prompt))
    assert client.ends == {CLEAR: 1, "answered with NaN": 1, "answered with numbers": 1}


def test_another_answer_and_nan_are_errors() -> None:
    """The beginning that a model was sure of is compared."""
    client = Told(answer((-0.1, 5), (-0.2, 6)))
    client.prompts, client.golden, client.margins = {"x": 2}, {"x": [5]}, {"x": [8.0, 8.0]}
    asyncio.run(client.compare("x"))
    client.golden = {"x": [4]}
    with pytest.raises(RuntimeError, match="instead of"):
        asyncio.run(client.compare("x"))
    client.answer = answer((-0.1, 5), (None, 6))
    with pytest.raises(RuntimeError, match="NaN"):
        asyncio.run(client.compare("x"))


def test_an_answer_that_lost_a_log_probability_is_asked_for_again() -> None:
    whole = answer((-0.1, 5), (-0.2, 6))
    short = answer((-0.2, 6))
    short["meta_info"] |= {"completion_tokens": 2, "num_retractions": 1}
    client = Told(None)
    answers = [short, whole]

    async def generate(prompt: str, **body: Any) -> Any:
        return answers.pop(0)

    client.generate = generate  # type: ignore[method-assign]
    assert asyncio.run(client.greedy("x", 2))[0] == [5, 6]


def test_common_beginning() -> None:
    assert common([1, 2, 3], [1, 2, 4, 5]) == [1, 2]
