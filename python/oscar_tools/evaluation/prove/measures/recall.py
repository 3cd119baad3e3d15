"""A function of a long module, to be repeated word for word."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.asking import SLACK, Client
from oscar_tools.evaluation.prove.functions import Function, modules, similarity
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Measure, rights
from oscar_tools.evaluation.prove.rates import counts, rate
from oscar_tools.evaluation.prove.store import Cell
from oscar_tools.evaluation.prove.texts import MEASUREMENT, python_documents

ENOUGH = 0.95
"""Similarity above which a function was repeated."""
FIRST, LAST = 64, SLACK
"""Tokens of a module in front of a function that is asked for, and behind it: the sink of an int2 server, and what it
may compute again behind a cached prefix."""
WIDE = 16
"""Characters that hold a token at least, in source code."""
EACH = 6
"""Functions that are asked of one module, and more only where there are too few modules."""
FENCE = 64
"""Tokens of an answer besides twice those of the function."""
LONGEST = 1024
"""Tokens of an answer at most; functions that need more are not asked for."""
BEFORE, BEHIND = "Here is Python source code:\n\n```python\n", "```\n\n"


def request(name: str) -> str:
    """What asks for a function."""
    return (
        f"Repeat the function `{name}` of this source code word for word, from its `def` line to its last line, in one "
        "```python block. Change nothing, leave nothing out and explain nothing."
    )


@dataclass(frozen=True)
class Asked:
    """One function to repeat.

    Attributes:
        prefix: token ids up to the end of the module.
        ids: the whole prompt, which begins with them.
        name, code: of the function.
        limit: tokens of an answer at most.
    """

    prefix: list[int]
    ids: list[int]
    name: str
    code: str
    limit: int


def choose(modules: Iterable[Iterator[Asked]], wanted: int) -> list[Asked]:
    """Functions of several modules, ``wanted`` of them or as many as there are; those of one module follow each other.

    Args:
        modules: what can be asked of each; no more are read than are needed.
        wanted: functions.
    """
    rest: list[tuple[list[Asked], Iterator[Asked]]] = []
    missing = wanted
    for module in modules:
        rest.append((list(islice(module, min(EACH, missing))), module))
        missing -= len(rest[-1][0])
        if missing == 0:
            break
    chosen = [taken for taken, _ in rest]
    while missing and rest:
        share, going_on = -(-missing // len(rest)), []
        for taken, module in rest:
            more = list(islice(module, min(share, missing)))
            taken.extend(more)
            missing -= len(more)
            if more:
                going_on.append((taken, module))
        rest = going_on
    return [asked for taken in chosen for asked in taken]


class Recall(Measure):
    """Modules are Python sources of this machine, of the part that rotations are not fitted on, one after the other
    until they fill the length."""

    name, title = "recall", "Recall of functions"

    def settings(self) -> dict[str, Any]:
        """Lengths, numbers and the sources by their content."""
        return {
            "lengths": self.material.recall_lengths,
            "functions": self.material.size.functions,
            "each": EACH,
            "prompts": self._digest(),
        }

    def units(self) -> list[str]:
        """``<length>/<number>``; those of one module follow each other."""
        return list(self.asked)

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(asked.ids) for asked in self.asked.values()), default=0)

    def reach(self) -> int:
        """Positions that prompts with their answers may have, at most."""
        return max((len(asked.ids) + asked.limit for asked in self.asked.values()), default=0)

    def prepare(self) -> None:
        """Choose modules and functions."""
        _ = self.asked

    @cached_property
    def asked(self) -> dict[str, Asked]:
        """Unit -> what is asked.

        Raises:
            DataError: this machine has too little source code, or the model takes too few tokens.
        """
        found: dict[str, Asked] = {}
        for length in self.material.recall_lengths:
            chosen = choose(self._of_length(length), self.material.size.functions)
            if len(chosen) < self.material.size.functions:
                raise DataError(
                    f"this machine's Python sources hold {len(chosen)} functions to recall in modules of {length} "
                    f"tokens, {self.material.size.functions} are needed; ask for shorter --recall-lengths"
                )
            found |= {f"{length}/{number}": asked for number, asked in enumerate(chosen)}
        return found

    def _of_length(self, length: int) -> Iterator[Iterator[Asked]]:
        """Modules: what can be asked of each."""
        texts = self.material.texts
        before, behind = texts.chat_frame()
        head, tail = before + texts.encode(BEFORE), texts.encode(BEHIND)

        def count(text: str) -> int:
            return len(texts.encode(text))

        room = length - len(head) - len(tail)
        for module, known in modules(python_documents(MEASUREMENT), room, count):
            random.Random(f"recall/{length}/{len(module)}").shuffle(known)
            yield self._of_module(module, known, head + texts.encode(module) + tail, behind)

    def _of_module(self, module: str, known: list[Function], prefix: list[int], behind: str) -> Iterator[Asked]:
        def count(text: str) -> int:
            return len(self.material.texts.encode(text))

        for function in known:
            code = module[function.begin : function.end]
            limit = 2 * count(code) + FENCE
            ids = prefix + self.material.texts.encode(request(function.name) + behind)
            # The beginning of a text says whether it has so many tokens.
            inside = (
                count(module[: function.begin][: WIDE * FIRST]) >= FIRST
                and count(module[function.end :][: WIDE * LAST]) >= LAST
            )
            if inside and limit <= LONGEST and len(ids) + limit <= self.material.context:
                yield Asked(prefix, ids, function.name, code, limit)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for asked in self.asked.values():
            digest.update(np.array(asked.ids, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """How alike the answer is, whether that is enough, and what it was. One that was cut off is not right."""
        asked = self.asked[unit]

        def alike(text: str) -> float:
            return similarity(text, asked.name, asked.code)

        answer = self.ask_chat(client, asked.prefix, asked.ids, asked.limit, lambda text: alike(text) > ENOUGH)
        return answer | {"similarity": round(alike(answer["text"]), 4), "name": asked.name}

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """By length: rates with paired tests, mean similarity, and how many were asked, answered and cut off."""
        right, base = rights(answers), None if reference is None else rights(reference)
        found: Figures = {"lengths": {}}
        for length in self.material.recall_lengths:
            units = [unit for unit in answers if unit.startswith(f"{length}/")]
            if units:
                found["lengths"][str(length)] = rate(right, base, units) | {
                    "similarity": float(np.mean([answers[unit]["similarity"] for unit in units])),
                    "counts": counts(self.material.size.functions, (answers[unit] for unit in units)),
                }
        found["all"] = rate(right, base, right)
        found["counts"] = counts(len(self.units()), answers.values())
        return found
