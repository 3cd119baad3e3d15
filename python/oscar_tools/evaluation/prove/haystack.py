"""Documents with facts hidden at known depths, and questions about the facts.

Token ids, not text: a line break ends a token in practice, so documents are made of lines that were encoded alone, and
every document has the length asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from oscar_tools.evaluation.ruler import WORDS

Encode = Callable[[str], list[int]]
FIRST, LAST = 128, 320
"""Tokens at either end of a document without facts: what int2 servers read in 16 bits, and some more."""
OVERRUN = 64
"""Tokens by which a fact may be later than its place, so that the line before it stays whole."""
DIGITS = 7
"""Of a hidden number: 1 in 10 million by chance."""
ADJECTIVES = ("", "red ", "green ", "blue ", "white ", "black ")
KEYS = tuple(adjective + word for adjective in ADJECTIVES for word in WORDS)
"""Names of facts; the plain words come first."""


def fact(key: str, number: str) -> str:
    """The line that states a fact."""
    return f"# The magic number for {key} is {number}.\n"


def question(key: str) -> str:
    """What is appended to a document; the answer comes next."""
    return f"# What is the magic number for {key}? The magic number for {key} is "


def draw_number(rng: random.Random) -> str:
    """A number to hide."""
    return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def recalled(answer: str, number: str) -> bool:
    """Whether an answer begins with a number."""
    return answer.lstrip(" *`\"'").startswith(number)


@dataclass(frozen=True)
class Haystack:
    """A document with facts.

    Attributes:
        ids: the document, without the question.
        key, number: the fact that is asked for.
        place: tokens before it.
    """

    ids: list[int]
    key: str
    number: str
    place: int


def build_haystack(
    encode: Encode,
    lines: tuple[str, ...],
    length: int,
    depth: float,
    distractors: int,
    seed: str,
    leading: list[int] | None = None,
) -> Haystack:
    """A document of exactly ``length`` tokens.

    Args:
        encode: text -> token ids.
        lines: what it is made of.
        length: tokens, ``leading`` included.
        depth: where the fact is, 0 to 1 of the places that have history on both sides.
        distractors: facts of other keys at random places.
        seed: chooses text, keys, numbers.
        leading: token ids in front.

    Raises:
        ValueError: the facts do not fit.
    """
    rng = random.Random(seed)
    keys = rng.sample(WORDS, 1 + distractors)
    numbers = [draw_number(rng) for _ in keys]
    facts = [encode(fact(key, number)) for key, number in zip(keys, numbers, strict=True)]
    # What is cut to fit ends in a line break, so that the question begins a line.
    end = encode("\n")
    room = length - len(leading or ()) - sum(map(len, facts)) - len(end)
    if room < FIRST + LAST + OVERRUN:
        raise ValueError(f"{len(facts)} facts do not fit into {length} tokens")
    places = [FIRST + round(depth * (room - LAST - FIRST)), *(rng.randrange(FIRST, room - LAST) for _ in facts[1:])]
    waiting = sorted(zip(places, range(len(facts)), strict=True))
    ids, text, asked = list(leading or ()), 0, 0
    begin = rng.randrange(len(lines))
    line, more = 0, list[int]()
    while text < room:
        while waiting and waiting[0][0] <= text:
            number = waiting.pop(0)[1]
            asked = len(ids) if number == 0 else asked
            ids += facts[number]
        if not more:
            more, line = encode(lines[(begin + line) % len(lines)]), line + 1
        taken = len(more)
        if waiting and text + taken > waiting[0][0] + OVERRUN:
            # A long line, such as a paragraph of prose, is broken where a fact belongs.
            taken = max(waiting[0][0] - text - len(end), 0)
            more = more[:taken] + end + more[taken:]
            taken += len(end)
        taken = min(taken, room - text)
        ids += more[:taken]
        text, more = text + taken, more[taken:]
    return Haystack(ids + end, keys[0], numbers[0], asked)
