"""Requests of the soak: drawn, sent, and counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from reference_model.retrieval import DIGITS, WORDS, Document, build_document, filler_lines, question  # noqa: E402, F401

KINDS = {
    "fresh": 0.3, "again": 0.25, "turns": 0.1, "long": 0.1, "abandoned": 0.1, "bound": 0.05, "several": 0.05,
    "logprobs": 0.05,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["amber", "falcon", "tiger"]}, "known": {"type": "boolean"}},
    "required": ["name", "known"],
    "additionalProperties": False,
}
PATTERN = r"[A-Z][a-z]{2,6}-[0-9]{3}"
SEVERAL = 3
"""Answers to a prompt that asks for more than one."""
SYSTEM_PROMPTS = 8
LINE = 12
"""Tokens of a line, about."""
FACTS = 4


@dataclass
class Tally:
    """What happened, in order of completion: 1 for a right answer, 0 for a wrong one, None for unscored requests."""

    scores: list[float | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def scored(self, part: slice) -> list[float]:
        """Scores of the scored requests of a part."""
        return [score for score in self.scores[part] if score is not None]

    def score(self, part: slice) -> float:
        """Mean of the scored requests of a part."""
        return sum(self.scored(part)) / max(len(self.scored(part)), 1)

    def drop(self, part: int) -> float:
        """How much lower the score of the last ``part`` requests is than that of the first, in standard errors."""
        first, last = self.scored(slice(0, part)), self.scored(slice(-part, None))
        pooled = (sum(first) + sum(last)) / max(len(first) + len(last), 1)
        error = (pooled * (1 - pooled) * (1 / max(len(first), 1) + 1 / max(len(last), 1))) ** 0.5
        return (self.score(slice(0, part)) - self.score(slice(-part, None))) / error if error else 0.0


class Client:
    """Draws and sends requests.

    Args:
        url: of the server.
        session: HTTP session.
        seed: of the draw.
        longest: tokens of the longest unscored prompt.
        model: folder of the model, for its tokenizer.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int, longest: int, model: Path) -> None:
        self.url, self.session, self.longest = url, session, longest
        self.rng = random.Random(seed)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.system = ["".join(self._lines(f"system {n}", 60)) for n in range(SYSTEM_PROMPTS)]
        self.known: list[tuple[str, Document]] = []
        self.tally = Tally()
        self.report: dict[str, Any] = {}

    def _some(self, most: int) -> int:
        """A number of lines, fewer where prompts must be short."""
        return self.rng.randrange(2, max(3, min(most, self.longest // LINE)))

    def _lines(self, seed: str, count: int) -> list[str]:
        rng, lines = random.Random(seed), filler_lines()
        begin = rng.randrange(len(lines) - count)
        return list(lines[begin : begin + count])

    async def complete(self, prompt: str, tokens: int, timeout: float | None = None) -> str:
        """A greedy completion; a timeout abandons the request, as a client that goes away does."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": timeout is not None}
        limit = aiohttp.ClientTimeout(total=timeout or 600)
        async with self.session.post(f"{self.url}/v1/completions", json=body, timeout=limit) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:200]}")
            if timeout is not None:
                await reply.read()
                return ""
            answer = await reply.json()
        details = answer["usage"].get("prompt_tokens_details") or {}
        self.tally.cached_tokens += details.get("cached_tokens") or 0
        self.tally.prompt_tokens += answer["usage"]["prompt_tokens"]
        self.tally.completion_tokens += answer["usage"]["completion_tokens"]
        return answer["choices"][0]["text"]

    async def generate(self, prompt: str, **body: Any) -> Any:
        """SGLang's own API, for what it answers beside text.

        Raises:
            RuntimeError: the server refused.
        """
        limit = aiohttp.ClientTimeout(total=600)
        body = {"text": prompt} | body
        async with self.session.post(f"{self.url}/generate", json=body, timeout=limit) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:200]}")
            return await reply.json()

    async def bound(self, prompt: str) -> None:
        """An answer to a JSON schema or to a regular expression, by chance.

        Raises:
            RuntimeError: it does not keep to it.
        """
        sampling: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 200}
        if self.rng.random() < 0.5:
            answer = await self.generate(prompt, sampling_params=sampling | {"json_schema": json.dumps(SCHEMA)})
            # White space is free, so that an answer may run out of tokens.
            cut = answer["meta_info"]["finish_reason"]["type"] == "length"
            right = cut or json.loads(answer["text"]).keys() == SCHEMA["properties"].keys()
        else:
            answer = await self.generate(prompt, sampling_params=sampling | {"regex": PATTERN})
            right = re.fullmatch(PATTERN, answer["text"]) is not None
        if not right:
            raise RuntimeError(f"not as it must be: {answer['text']!r}")

    async def several(self, prompt: str) -> None:
        """More than one answer to a prompt.

        Raises:
            RuntimeError: there are fewer, or shorter ones.
        """
        sampling = {"temperature": 1.0, "n": SEVERAL, "max_new_tokens": 24, "ignore_eos": True}
        answers = await self.generate(prompt, sampling_params=sampling)
        lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
        if lengths != [24] * SEVERAL:
            raise RuntimeError(f"answers of {lengths} tokens")

    async def with_logprobs(self, prompt: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """``meta_info`` of an answer with log probabilities. SGLang loses the first one of a request that it retracts
        between its prefill and the result of that: such a request is sent again.
        """
        for _ in range(5):
            answer = await self.generate(prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
            meta: dict[str, Any] = answer["meta_info"]
            if not meta["num_retractions"] or len(meta["output_token_logprobs"]) == meta["completion_tokens"]:
                break
        return meta

    async def logprobs(self, prompt: str) -> None:
        """An answer with log probabilities of its tokens, the best of which is the greedy choice.

        Raises:
            RuntimeError: one is missing, or no log probability.
        """
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        meta = await self.with_logprobs(prompt, sampling)
        own, best = meta["output_token_logprobs"], meta["output_top_logprobs"]
        if len(own) != 16 or any(
            not token[0] <= 0 or token[0] < top[0][0] - 1e-3 for token, top in zip(own, best, strict=True)
        ):
            raise RuntimeError(f"log probabilities {own}, best {best}")

    async def one(self, kind: str, number: int) -> None:
        """One request of a kind (two for ``turns``), scored where it has a right answer."""
        score: float | None = None
        if kind in ("fresh", "again"):
            if kind == "fresh" or not self.known:
                length = self.rng.choice((700, 1200, 2400, 4000, 6500))
                text = build_document(lambda t: len(self.tokenizer.encode(t).ids), length, FACTS, 10_000 + number)
                self.known.append((self.rng.choice(self.system), text))
            system, document = self.known[-1] if kind == "fresh" else self.rng.choice(self.known)
            word = self.rng.choice(list(document.facts))
            answer = await self.complete(system + document.text + question(word), DIGITS)
            score = float(answer == document.facts[word])
        elif kind == "turns":
            prompt = "".join(self._lines(f"turn {number}", self._some(80)))
            first = await self.complete(prompt, self.rng.randrange(50, max(51, min(600, self.longest // 4))))
            await self.complete(
                prompt + first + "".join(self._lines(f"next {number}", min(40, self.longest // LINE))), 32
            )
        elif kind == "long":
            # Uniform in the logarithm: of 10 to ``longest`` tokens, most of them few.
            tokens = round(10 * (self.longest / 10) ** self.rng.random())
            ids = self.tokenizer.encode("".join(self._lines(f"long {number}", tokens // 5 + 2))).ids[:tokens]
            await self.complete(self.tokenizer.decode(ids), 16)
        elif kind in ("bound", "several", "logprobs"):
            await getattr(self, kind)("".join(self._lines(f"{kind} {number}", self._some(200))))
        else:
            prompt = "".join(self._lines(f"gone {number}", self._some(400)))
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await self.complete(prompt, 1000, timeout=self.rng.uniform(0.01, 0.5))
        self.tally.scores.append(score)
        self.tally.counts[kind] = self.tally.counts.get(kind, 0) + 1

    async def noted(self, name: str, request: Awaitable[None]) -> None:
        """Wait for a request; an error is noted under its name."""
        try:
            await request
        except Exception as error:
            self.tally.errors.append(f"{name}: {type(error).__name__}: {error}"[:300])

    async def run(self, requests: int, concurrency: int) -> Tally:
        """Send ``requests`` requests, ``concurrency`` at a time."""
        kinds = self.rng.choices(list(KINDS), list(KINDS.values()), k=requests)
        gate = asyncio.Semaphore(concurrency)

        async def guarded(kind: str, number: int) -> None:
            async with gate:
                await self.noted(f"{kind} {number}", self.one(kind, number))

        await asyncio.gather(*(guarded(kind, number) for number, kind in enumerate(kinds)))
        return self.tally
