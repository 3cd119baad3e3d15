"""Retrieval tasks: documents of Python text with facts hidden in them, and questions about the facts.

Used in training, in the evaluation, by the quickstart and by tests. No torch here. Example:

>>> tokens = lambda text: len(text) // 3          # a tokenizer's length function in real use
>>> document = build_document(tokens, length=1000, facts=4, seed=7)
>>> len(document.facts), 900 < tokens(document.text) <= 1000
(4, True)
>>> word, number = next(iter(document.facts.items()))
>>> fact_line(word, number) in document.text
True
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DIGITS = 7
"""Digits in a magic number: 1 in 10 million by chance."""

HELD_OUT = (
    "argparse.py", "statistics.py", "calendar.py", "shutil.py", "textwrap.py", "tarfile.py", "zipfile.py",
    "zipfile/__init__.py", "csv.py", "configparser.py", "difflib.py", "fractions.py", "heapq.py", "imaplib.py",
    "mailbox.py", "optparse.py", "pdb.py", "plistlib.py", "sched.py", "smtplib.py", "string.py", "tempfile.py",
)  # fmt: skip
"""Standard library modules that training never sees; documents and the held-out loss are made of them."""

_WORDS = """
    amber anchor apple arrow autumn badge bamboo banjo basket beacon beaver berry bishop blanket blossom bottle
    branch breeze bridge bronze bucket butter button cabin cactus camel candle canyon carbon carpet castle cedar
    cellar chapel cherry circus citrus clover cobalt coffee comet copper coral cotton cradle crater cricket crystal
    curtain dagger daisy desert diamond dolphin dragon eagle ember engine falcon feather fiddle flame flute forest
    fossil fountain galaxy garden garlic ginger glacier goblet granite grape guitar hammer harbor hazel helmet
    heron honey hunter island ivory jacket jaguar jasmine jungle kettle kitten ladder lagoon lantern lemon
    leopard lilac lizard lobster magnet mango maple marble meadow melon mirror monkey mountain mustard nectar needle
    nickel nutmeg oasis ocean olive onion orchid otter oyster paddle palace panther parrot pebble pepper piano
    pigeon pillow planet pocket poplar potato prairie pumpkin puzzle quartz rabbit radish raven ribbon river rocket
    saddle saffron salmon sapphire scarlet shadow silver sparrow spider spruce stable sunset tiger timber tomato
    tulip tunnel turtle valley velvet violet walnut whale willow window winter zebra
"""
WORDS = tuple(_WORDS.split())
"""Names of facts. Training never uses them in a fact, so recalling them is not memorized."""


@dataclass(frozen=True)
class Document:
    """``text`` ends in a newline; ``facts`` maps each word to its number, in order of position."""

    text: str
    facts: dict[str, str]


def fact_line(word: str, number: str) -> str:
    """The line that states a fact."""
    return f"# The magic number for {word} is {number}.\n"


def question(word: str) -> str:
    """What to append to a document for ``/v1/completions``; the answer is the next ``DIGITS`` tokens."""
    return f"# What is the magic number for {word}? The magic number for {word} is "


def chat_question(word: str) -> str:
    """What to append to a document, or send as a later turn, in ``/v1/chat/completions``."""
    return f"What is the magic number for {word}?"


def chat_answer(word: str, number: str) -> str:
    """The assistant's answer to :func:`chat_question`."""
    return f"The magic number for {word} is {number}."


@cache
def filler_lines() -> tuple[str, ...]:
    """Lines of the held-out modules of the running Python, in a fixed order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [(stdlib / name).read_text(encoding="utf-8") for name in HELD_OUT if (stdlib / name).is_file()]
    return tuple(line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n"))


def build_document(
    count_tokens: Callable[[str], int],
    length: int,
    facts: int,
    seed: int,
    first: int = 64,
    last: int = 256,
    words: tuple[str, ...] = WORDS,
    lines: Sequence[str] | None = None,
) -> Document:
    """A document of at most ``length`` tokens (and at most about 20 fewer) with facts at random depths.

    The same arguments give the same document on the same Python version.

    Args:
        count_tokens: length of a text in tokens of the model that will read it.
        length: tokens of the document.
        facts: facts to hide.
        seed: chooses the text, the words, the numbers and the depths.
        first, last: tokens at either end in which no fact begins or ends. The defaults are the 16-bit windows of
            the server, so that every fact is read from the quantized part of the cache.
        words: names to draw from.
        lines: what the document is made of, each with its line break; :func:`filler_lines` by default.

    Raises:
        ValueError: if the facts do not fit into the length.
    """
    rng = random.Random(seed)
    named = {word: f"{rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)}" for word in rng.sample(words, facts)}
    statements = [fact_line(word, number) for word, number in named.items()]
    budget = length - count_tokens("".join(statements))
    if budget < first + last + facts:
        raise ValueError(f"{facts} facts do not fit into {length} tokens outside windows of {first} and {last}")
    lines = lines or filler_lines()
    begin = rng.randrange(len(lines))
    chosen: list[str] = []
    ends: list[int] = []
    total = 0
    while True:
        line = lines[(begin + len(chosen)) % len(lines)]
        # Lines tokenize nearly independently; the remainder below absorbs what a merged blank line changes.
        tokens = count_tokens(line)
        if total + tokens > budget:
            break
        total += tokens
        chosen.append(line)
        ends.append(total)
    usable = [i for i, end in enumerate(ends) if first <= end <= total - last]
    if len(usable) < facts:
        raise ValueError(f"too few lines for {facts} facts in {length} tokens")
    depths = sorted(rng.sample(usable, facts))
    for statement, depth in zip(reversed(statements), reversed(depths), strict=True):
        chosen.insert(depth + 1, statement)
    return Document("".join(chosen), named)
