"""RULER's needle-in-a-haystack task, generated here: no download, any context length.

The rows and the template are those of RULER's ``niah_single_1`` (noise haystack, one number for one word) and
``niah_multikey_1`` (the same with three other words as distractors); RULER, arXiv 2404.06654. Rows made by RULER's own
scripts, with essays as haystack, can be given instead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from oscar_rotation.atomic import write_text_atomically

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
TEMPLATE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n{context}\n"
    "What are all the special magic numbers for {query} mentioned in the provided text?"
)
WORDS = """
amber anchor badger basil canyon cedar comet copper coral delta ember falcon fennel garnet
glacier harbor hazel island ivory jasper juniper kettle lagoon lantern linen maple marble meadow
nectar nutmeg oasis orchid otter pebble pepper prairie quartz raven river saffron sierra spruce
tundra velvet violet walnut willow zephyr
""".split()  # noqa: SIM905 (a list of 48 strings reads worse)
DISTRACTORS = 3
RESERVE = 128
"""Tokens left for the chat template and the answer."""


def make_row(index: int, tokens: int, count: Callable[[str], int], seed: int) -> dict[str, object]:
    """One question.

    Args:
        index: number of the row; even ones are ``niah_single_1``, odd ones ``niah_multikey_1``.
        tokens: context length, the reserve for template and answer included.
        count: length of a text in tokens.
        seed: of the data set.

    Returns:
        a row in RULER's form: ``index``, ``input``, ``outputs``, ``length``, and ``task``.
    """
    rng = random.Random(f"{seed}-{index}")
    keys = rng.sample(WORDS, 1 if index % 2 == 0 else 1 + DISTRACTORS)
    values = {key: str(rng.randint(1_000_000, 9_999_999)) for key in keys}
    needles = [NEEDLE.format(key=key, value=value) for key, value in values.items()]

    def text(sentences: int) -> str:
        lines = [NOISE] * sentences
        place = random.Random(f"{seed}-{index}-places")
        for needle in needles:
            lines.insert(place.randint(0, len(lines)), needle)
        return TEMPLATE.format(context="\n".join(lines), query=keys[0])

    low, high = 1, max(2, tokens // 4)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text(middle)) + RESERVE <= tokens:
            low = middle
        else:
            high = middle - 1
    prompt = text(low)
    task = "niah_single_1" if index % 2 == 0 else "niah_multikey_1"
    return {"index": index, "input": prompt, "outputs": [values[keys[0]]], "length": count(prompt), "task": task}


def write_niah(path: Path, tokens: int, rows: int, count: Callable[[str], int], seed: int = 0) -> Path:
    """Write a data set unless it is there; the same arguments give the same rows."""
    if not path.exists():
        lines = [json.dumps(make_row(index, tokens, count, seed)) for index in range(rows)]
        write_text_atomically(path, "\n".join(lines) + "\n")
    return path
