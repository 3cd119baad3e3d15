"""Questions of the user's files, many in one cached prompt, one of them asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.asking import Client
from oscar_tools.evaluation.prove.burying import bury
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Measure, rights
from oscar_tools.evaluation.prove.questions import Question, QuestionFile
from oscar_tools.evaluation.prove.rates import counts, rate
from oscar_tools.evaluation.prove.sizes import ROOM
from oscar_tools.evaluation.prove.store import Cell

TOKENS = 3400
"""Of all questions of a prompt, unless the model takes less."""
INTRODUCTION = "Here are numbered problems. You will be asked to solve one of them.\n\n"


@dataclass(frozen=True)
class Asked:
    """One question in its prompt.

    Attributes:
        prefix: token ids up to the end of all questions; the same for all that are asked in one prompt.
        ids: the whole prompt, which begins with them.
        begin, end: where the question stands in it.
        question: what decides whether an answer is right.
    """

    prefix: list[int]
    ids: list[int]
    begin: int
    end: int
    question: Question


class Tasks(Measure):
    """What is asked is read from the cache alone: it stands once in the prompt, in front of what is computed anew.

    Prompts are the same for every cache.
    """

    name, title = "tasks", "Buried tasks"

    def settings(self) -> dict[str, Any]:
        """Files by their content, sizes and what is said."""
        files = self.material.tasks
        questions = [question for file in files for question in file.questions.values()]
        return {
            "files": {file.name: file.digest for file in files},
            "count": self.material.task_count,
            "context": self.material.context,
            "tokens": TOKENS,
            "introduction": INTRODUCTION,
            "forms": sorted({(question.request(0), question.limit) for question in questions}),
        }

    def units(self) -> list[str]:
        """``<file>/<line>``; those of one prompt follow each other."""
        return list(self.asked)

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(asked.ids) for asked in self.asked.values()), default=0)

    def reach(self) -> int:
        """Positions that prompts with their answers may have, at most."""
        return max((len(asked.ids) + asked.question.limit for asked in self.asked.values()), default=0)

    def prepare(self) -> None:
        """Make the prompts."""
        _ = self.asked

    @cached_property
    def asked(self) -> dict[str, Asked]:
        """Unit -> question in its prompt.

        Raises:
            DataError: a file has too few questions, or the model takes too few tokens.
        """
        return {unit: asked for file in self.material.tasks for unit, asked in self._of_file(file)}

    def _of_file(self, file: QuestionFile) -> Iterator[tuple[str, Asked]]:
        texts = self.material.texts
        before, behind = texts.chat_frame()
        before = before + texts.encode(INTRODUCTION)
        names, questions = list(file.questions), list(file.questions.values())
        room = self.material.context - ROOM - len(before) - len(texts.encode(questions[0].request(99) + behind))
        budget = min(TOKENS, room - max(question.limit for question in questions))
        sizes = [len(texts.encode(_numbered(1, question))) for question in questions]
        try:
            groups = bury(sizes, spread(len(names), self.material.task_count), len(before), budget)
        except ValueError as error:
            raise DataError(f"{file.name}: {error}") from None
        for group in groups:
            prefix, places = list(before), {}
            for number, i in enumerate(group.order, 1):
                begin = len(prefix)
                prefix += texts.encode(_numbered(number, questions[i]))
                places[i] = number, begin, len(prefix)
            for i in group.asked:
                number, begin, end = places[i]
                ids = prefix + texts.encode(questions[i].request(number) + behind)
                yield f"{file.name}/{names[i]}", Asked(prefix, ids, begin, end, questions[i])

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """Whether the answer is right, and what it was. One that was cut off is not."""
        asked = self.asked[unit]
        return self.ask_chat(client, asked.prefix, asked.ids, asked.question.limit, asked.question.right)

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """By file: rates with paired tests, and how many were asked, answered and cut off."""
        right, base = rights(answers), None if reference is None else rights(reference)
        found: Figures = {"files": {}}
        for file in self.material.tasks:
            asked = [unit for unit in self.units() if unit.startswith(f"{file.name}/")]
            units = [unit for unit in asked if unit in answers]
            if units:
                numbers = counts(len(asked), (answers[unit] for unit in units))
                found["files"][file.name] = rate(right, base, units) | {"counts": numbers}
        found["counts"] = counts(len(self.units()), answers.values())
        return found


def spread(held: int, wanted: int | None) -> list[int]:
    """So many numbers below ``held``, evenly; all of them without a wish.

    >>> spread(10, 3), spread(2, 5)
    ([1, 5, 8], [0, 1])
    """
    count = held if wanted is None else min(held, wanted)
    return [(2 * i + 1) * held // (2 * count) for i in range(count)]


def _numbered(number: int, question: Question) -> str:
    return f"Problem {number}:\n{question.text()}\n\n"
