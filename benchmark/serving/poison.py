"""Poisoned requests among others: every N-th has a token whose embedding is NaN, and nobody else may notice.

Others are asked before there is poison, cold and from the cache. What the model is sure of in all of these answers is
golden: later answers must begin with it. No log probability may be missing or NaN. A poisoned request must end with an
error that says why, and what it computed may be found neither in the prefix cache nor in storage. Where drafts are
made, the poisoned token is drafted on purpose behind every golden question, and rejected.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from soak_client import DIGITS, FACTS, WORDS, Client, Tally, build_document, question

from oscar_tools.local_server import LocalServer

TOKEN, TEXT = 1, "<|im_start|>"
"""Nothing else here says it: other requests complete text of files."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DOCUMENTS = 16
LENGTHS = (600, 800, 1200)
"""Tokens of documents."""
CONTINUED = 16
"""Tokens of an answer that goes on with a document."""
SURE = 1.0
"""Nats by which a golden token is more probable than the next one: more than other batches or hits move it."""
LEAST = 8
"""Golden prompts whose smallest margins are in the report: other answers to these say less."""
CACHED = (0.0, 0.3, 0.6, 0.9, 1.0)
"""Shares of a prompt that are in the cache when its golden answer is asked for. What is computed reads exact keys and
values of its chunk, what is a hit was rounded to two bits before: the same question may be answered by 7 nats when its
prompt is computed, and otherwise by 5 when it is a hit. Later hits end anywhere, as the pool is small."""
PROBES = 8
"""Poisoned prompts that are asked again at the end, one by one, to see what they hit."""
COUNTER = "sglang:oscar_broken_requests_total"
"""Where the server counts requests that it ended."""
CLEAR = "a clear error"
WHY = re.compile(r"not a number|NaN")
"""What an error that is clear says."""


def poisoned_copy(model: Path, folder: Path) -> Path:
    """A copy of a model in which the embedding of :data:`TOKEN` is NaN; its logits are those of the model.

    Args:
        model: of :data:`soak.MODEL`'s kind.
        folder: to be made.
    """
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights[HEAD] = weights.get(HEAD, weights[EMBEDDING]).clone()
    weights[EMBEDDING][TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    return folder


def server_arguments(drafts: Path | None) -> list[str]:
    """Arguments of a server with storage, or with drafts, some of which are poisoned.

    Args:
        drafts: file to be made of texts that drafts come from; None for storage, which int2 mode serves without drafts.
    """
    if drafts is None:
        args = "--enable-metrics --enable-hierarchical-cache --hicache-ratio 4 --hicache-storage-backend file"
        return [*args.split(), "--hicache-storage-prefetch-policy", "wait_complete"]
    drafts.write_text("".join(json.dumps(question(word) + TEXT) + "\n" for word in WORDS))
    args = "--enable-metrics --speculative-algorithm NGRAM --speculative-num-draft-tokens 6"
    args += " --speculative-ngram-external-sam-budget 2 --speculative-ngram-external-corpus-path"
    return [*args.split(), str(drafts)]


class PoisonClient(Client):
    """Draws and sends requests of which every N-th is poisoned.

    Args:
        server: for its log and its caches.
        others: arguments of :class:`soak_client.Client`.
        every: N.
    """

    def __init__(self, server: LocalServer, *others: Any, every: int) -> None:
        super().__init__(*others)
        self.server, self.every = server, every
        self.prompts: dict[str, int] = {}
        self.facts: dict[str, str] = {}
        self.golden: dict[str, list[int]] = {}
        self.margins: dict[str, list[float]] = {}
        self.poisoned: dict[str, str] = {}
        self.ends: Counter[str] = Counter()
        self.compared = 0
        for number in range(DOCUMENTS):
            length = LENGTHS[number % len(LENGTHS)]
            document = build_document(lambda t: len(self.tokenizer.encode(t).ids), length, FACTS, number)
            facts = {document.text + question(word): digits for word, digits in document.facts.items()}
            self.facts |= facts
            self.prompts |= dict.fromkeys(facts, DIGITS)
            self.prompts[document.text] = CONTINUED

    async def greedy(self, prompt: str, tokens: int) -> tuple[list[int], list[float]]:
        """Tokens of an answer, and by how many nats each is more probable than the next one.

        Raises:
            RuntimeError: the server refused, or a log probability is none.
        """
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        meta = await self.with_logprobs(prompt, sampling)
        self.tally.cached_tokens += meta["cached_tokens"]
        self.tally.prompt_tokens += meta["prompt_tokens"]
        self.tally.completion_tokens += meta["completion_tokens"]
        own, best = meta["output_token_logprobs"], meta["output_top_logprobs"]
        numbers = [one[0] for one in own] + [one[0] for top in best for one in top]
        if len(own) != tokens or not all(number is not None and number <= 0 for number in numbers):
            raise RuntimeError(f"NaN or missing among log probabilities {own}")
        if other := [(one, top[0]) for one, top in zip(own, best, strict=True) if one[0] < top[0][0]]:
            raise RuntimeError(f"tokens that are not the most probable: {other}")
        return [one[1] for one in own], [top[0][0] - top[1][0] for top in best]

    async def complete(self, prompt: str, tokens: int, timeout: float | None = None) -> str:
        """A greedy completion with log probabilities, none of which is NaN; a timeout abandons it."""
        if timeout is not None:
            return await super().complete(prompt, tokens, timeout)
        return self.tokenizer.decode((await self.greedy(prompt, tokens))[0])

    async def learn(self, concurrency: int) -> None:
        """Ask for the golden answers, with a share of the prompts in the cache, and at last behind hits."""
        gate = asyncio.Semaphore(concurrency)

        async def ask(prompt: str, tokens: int) -> None:
            async with gate:
                ids, margins = await self.greedy(prompt, tokens)
            sure = next((i for i, margin in enumerate(margins) if margin < SURE), tokens)
            self.golden[prompt] = common(self.golden.get(prompt, ids), ids[:sure])
            self.margins[prompt] = [*map(min, self.margins.get(prompt, margins), margins)]

        async def cache(beginning: str) -> None:
            async with gate:
                await self.greedy(beginning, 1)

        for share in CACHED:
            if share < 1:
                await asyncio.to_thread(self.server.flush)
                beginnings = {prompt[: round(len(prompt) * share)] for prompt in self.prompts} - {""}
                await asyncio.gather(*map(cache, beginnings))
            await asyncio.gather(*(ask(*one) for one in self.prompts.items()))
        self.golden = {prompt: ids for prompt, ids in self.golden.items() if ids}

    async def one(self, kind: str, number: int) -> None:
        """A poisoned request, one with a golden answer in place of longer documents, or another of its kind."""
        if number % self.every == self.every - 1:
            kind, score = "poisoned", None
            await self.poison()
        elif kind in ("fresh", "again", "long"):
            kind, score = "golden", 1.0
            await self.compare(self.rng.choice(list(self.golden)))
        else:
            return await super().one(kind, number)
        self.tally.scores.append(score)
        self.tally.counts[kind] = self.tally.counts.get(kind, 0) + 1

    def right(self, prompt: str) -> bool:
        """Whether the golden part of an answer is the beginning of the number in the document."""
        return self.facts[prompt].startswith(self.tokenizer.decode(self.golden.get(prompt, [])))

    async def compare(self, prompt: str) -> None:
        """Ask for a golden answer again.

        Raises:
            RuntimeError: it is another.
        """
        want = self.golden[prompt]
        got, margins = await self.greedy(prompt, self.prompts[prompt])
        self.compared += 1
        if got[: len(want)] != want:
            first = len(common(got, want))
            by, was = (f"by {one[first]:.2f} nats" for one in (margins, self.margins[prompt]))
            raise RuntimeError(f"answer {got} (token {first} {by}) instead of {want} ({was} or more)")

    async def run(self, requests: int, concurrency: int) -> Tally:
        """Learn golden answers, send requests, and look at the end at what is cached and stored."""
        await self.learn(concurrency)
        begin = await self.counters()
        await super().run(requests, concurrency)
        ends, counters = dict(self.ends), await self.counters()
        cached = await self.hits()
        await asyncio.to_thread(self.server.flush)
        stored = await self.hits()
        for prompt in self.golden:
            await self.noted("golden, from storage", self.compare(prompt))
        self.report = {
            "poisoned_every": self.every,
            "poisoned_ended_with": ends,
            "golden_prompts": f"{len(self.golden)} of {len(self.prompts)}",
            "golden_tokens": sum(map(len, self.golden.values())),
            "golden_least_margins": sorted(
                round(min(self.margins[prompt][: len(ids)]), 2) for prompt, ids in self.golden.items()
            )[:LEAST],
            "golden_right": f"{sum(map(self.right, self.facts))} of {len(self.facts)}",
            "golden_comparisons": self.compared,
            "counted": {name: count - begin.get(name, 0) for name, count in counters.items()},
            "hits_behind_poison": cached,
            "hits_behind_poison_from_storage": stored,
        }
        ended = counters.get(COUNTER, 0) - begin.get(COUNTER, 0)
        if ends != {CLEAR: ended} or set(self.ends) != {CLEAR} or any(cached + stored):
            self.tally.errors.append(f"poisoned requests: {dict(self.ends)}, {ended} counted, hits {cached}, {stored}")
        return self.tally

    async def poison(self, prompt: str | None = None) -> None:
        """Ask one of the golden prompts with the poisoned token in it; note how that ends."""
        if prompt is None:
            lines = self.rng.choice(list(self.golden)).splitlines(keepends=True)
            clean = "".join(lines[: self.rng.randrange(1, len(lines))])
            prompt = clean + TEXT + "".join(lines)[len(clean) :]
            self.poisoned[prompt] = clean
        try:
            await self.greedy(prompt, DIGITS)
            self.ends["answered with numbers"] += 1
        except RuntimeError as error:
            text = str(error)
            clear = re.match(r"\d{3}: ", text) and WHY.search(text)
            self.ends[CLEAR if clear else "answered with NaN" if "NaN" in text else text[:200]] += 1

    async def hits(self) -> list[int]:
        """Tokens at and behind the poisoned one that poisoned prompts find in a cache, asked one by one."""
        found = []
        for prompt in list(self.poisoned)[-PROBES:]:
            before = len(self.server.text())
            await self.poison(prompt)
            # A request that is retracted has several batches.
            cached = max(map(int, re.findall(r"#cached-token: (\d+)", self.server.text()[before:])), default=0)
            found.append(max(0, cached - len(self.tokenizer.encode(self.poisoned[prompt]).ids)))
        return found

    async def counters(self) -> dict[str, float]:
        """Counters of int2 mode by name, summed over labels, and SGLang's of aborted requests."""
        async with self.session.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        sums: Counter[str] = Counter()
        for line in lines:
            if match := re.match(r"(sglang:(?:oscar_\w+_total|num_aborted_requests_total))\{.*\} (\S+)$", line):
                sums[match[1]] += float(match[2])
        return dict(sums)


def common(a: Iterable[int], b: Iterable[int]) -> list[int]:
    """The beginning that two lists have in common."""
    same = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same.append(x)
    return same
