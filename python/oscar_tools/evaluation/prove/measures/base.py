"""What a measure is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_tools.evaluation.prove.asking import Client
from oscar_tools.evaluation.prove.questions import QuestionFile
from oscar_tools.evaluation.prove.rates import LENGTH
from oscar_tools.evaluation.prove.sizes import ANSWER, Size
from oscar_tools.evaluation.prove.store import Cell
from oscar_tools.evaluation.prove.texts import MEASUREMENT, Texts

Answer = dict[str, Any]
Answers = Mapping[str, Answer]
"""Unit -> answer."""
Figures = dict[str, Any]


def rights(answers: Answers) -> dict[str, bool]:
    """Unit -> whether its answer is right."""
    return {unit: bool(answer["right"]) for unit, answer in answers.items()}


@dataclass(frozen=True)
class Material:
    """What measures are made of.

    Attributes:
        texts: of the model's tokenizer.
        size: how much.
        lengths: contexts in tokens, ascending.
        context: tokens that the model takes.
        tasks: files of questions.
        task_count: how many of each file are asked; None for all.
        recall_lengths: tokens of modules whose functions are recalled, ascending.
        seeds: how often the questions of retrieval are drawn.
    """

    texts: Texts
    size: Size
    lengths: tuple[int, ...]
    context: int
    tasks: tuple[QuestionFile, ...] = ()
    task_count: int | None = None
    recall_lengths: tuple[int, ...] = ()
    seeds: int = 1

    def lines(self) -> tuple[str, ...]:
        """Lines for documents with facts."""
        return self.texts.lines(MEASUREMENT)


class Measure(ABC):
    """One thing that is asked of every cache.

    Attributes:
        name: on the command line and in file names.
        title: on the page.
    """

    name: str
    title: str

    def __init__(self, material: Material) -> None:
        self.material = material

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that decides what is asked, as JSON values; besides model, text and cache."""

    @abstractmethod
    def units(self) -> Sequence[str]:
        """Names of what is asked and kept one by one."""

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.material.lengths[-1]

    def reach(self) -> int:
        """Positions that prompts with their answers may have, at most."""
        return min(self.longest() + ANSWER, self.material.context)

    def prepare(self) -> None:
        """Make what is asked, before the first server is started.

        Raises:
            DataError: the text source holds too little.
        """
        self.material.lines()

    @abstractmethod
    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """Ask a server.

        Args:
            client: of the server.
            unit: one of :meth:`units`.
            cell: where arrays of the answer may be kept.
            reference: answers of the BF16 cache; None where the server is that.

        Returns:
            JSON values.

        Raises:
            AskingError: no answer.
        """

    def ask_chat(
        self, client: Client, prefix: list[int], ids: list[int], limit: int, right: Callable[[str], bool]
    ) -> Answer:
        """Ask behind a cached prefix, and keep what was said and whether it is right; one that was cut off is not.

        Args:
            client: of the server.
            prefix: token ids that are cached first.
            ids: the whole prompt, which begins with them.
            limit: tokens of an answer at most.
            right: of the text of an answer.

        Raises:
            AskingError: no answer.
        """
        stops = self.material.texts.chat_stops()
        reply = client.behind_cache(prefix, ids, limit, {"stop": stops} if stops else {})
        return {
            "right": reply.finish != LENGTH and right(reply.text),
            "finish": reply.finish,
            "text": reply.text,
            "cached": reply.cached,
        }

    def unavailable(self, client: Client) -> str | None:
        """Why a server cannot be asked, if it cannot."""
        return None

    @abstractmethod
    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """What answers of one cache come to, beside those of the BF16 cache (None for that cache itself)."""
