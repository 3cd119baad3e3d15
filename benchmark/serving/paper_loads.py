"""The serving experiments of the OSCAR paper (arXiv 2605.17757, section 5.4) as loads: who is sent what, at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

COLD, HIT, OFF = "cold", "hit", "off"
"""The prefix cache before a measurement: empty; holding every prompt; switched off."""
STEPS = "table8"
"""The experiment that records steps of decoding in place of tokens per second."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once: how many, tokens of a prompt and of an answer, and the prefix cache before."""

    requests: int
    prompt: int
    answer: int
    cache: str = COLD


EXPERIMENTS: dict[str, list[Load]] = {
    STEPS: [Load(requests, 8192, 512, HIT) for requests in (1, 8, 16, 32, 64, 128)],
    "table9": [Load(32, 8192, 1024)],
    "figure4": [Load(1, prompt, 1024, HIT) for prompt in (30_000, 60_000, 100_000)]
    + [Load(requests, 100_000, 1024, HIT) for requests in (8, 32)],
    "figure5": [Load(1 << power, 100_000, 1024) for power in range(9)],
    "figure6": [Load(requests, 100_000, 1024, cache) for cache in (OFF, COLD, HIT) for requests in (1, 8, 16, 32)],
}
"""By the name of the paper's table or figure.

The paper does not state the context of table 8; 8,192 tokens are our reading of it. Keys and values of Qwen3-8B take
147,456 bytes a token in BF16, so 32 requests of 8,192 to 9,216 tokens have 39 to 44 GB, which the paper's 17.0 ms of
attention read at 2.3 to 2.6 of the H100's 3.35 TB/s; and 32 of them fit a card of 80 GB, 64 do not, as in the table.
Answers of that experiment need only be long enough to record steps while all requests run.
"""
SHORTEST_ANSWER = {STEPS: 160}
"""Tokens that an answer keeps in a smoke test: 16 where nothing is said, enough for a time between tokens. Steps want
some lines of the server's log while all requests run."""


def chosen(experiments: str, shrink: int) -> list[tuple[str, Load]]:
    """Loads by experiment.

    Args:
        experiments: names with commas; ``NAME:1+32`` is only the loads of 1 and 32 requests at once.
        shrink: divides prompts and answers.

    Raises:
        ValueError: there is no such experiment, or it has no load of so many requests.
    """
    loads = []
    for part in experiments.split(","):
        name, _, counts = part.partition(":")
        if name not in EXPERIMENTS:
            raise ValueError(f"no {name}; there are {', '.join(EXPERIMENTS)}")
        offered = {load.requests for load in EXPERIMENTS[name]}
        asked = {int(count) for count in counts.split("+")} if counts else offered
        if unknown := asked - offered:
            raise ValueError(f"{name} has no load of {min(unknown)} requests")
        found = [load for load in EXPERIMENTS[name] if load.requests in asked]
        loads += [(name, shrunk(load, shrink, SHORTEST_ANSWER.get(name, 16))) for load in found]
    return loads


def shrunk(load: Load, by: int, shortest: int) -> Load:
    """A load of shorter prompts and answers; these are not shorter than ``shortest`` tokens."""
    return replace(load, prompt=max(64, load.prompt // by), answer=max(shortest, load.answer // by)) if by > 1 else load
