"""Exact recall of a number hidden in a cached document, by length and depth."""

from __future__ import annotations

from typing import Any

from oscar_tools.evaluation.prove.asking import Client
from oscar_tools.evaluation.prove.haystack import Haystack, build_haystack, question, recalled
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Measure, rights
from oscar_tools.evaluation.prove.rates import counts, rate
from oscar_tools.evaluation.prove.store import Cell

TASKS = {"needle": 0, "multi-key": 3}
"""Task -> facts of other keys in the same document, as in RULER's single needle and multi-key tasks."""
ANSWER, STOPS = 24, ["\n"]
"""Tokens; a number has 7 digits. The text that states a fact ends with its line."""


class Retrieval(Measure):
    """A document is cached by a first request; the question arrives behind it."""

    name, title = "retrieval", "Needle and multi-key retrieval"

    def settings(self) -> dict[str, Any]:
        """Sizes and tasks."""
        size = self.material.size
        return {
            "lengths": self.material.lengths,
            "depths": size.depths,
            "questions": self.questions(),
            "tasks": TASKS,
            "answer": ANSWER,
            "stops": STOPS,
        }

    def questions(self) -> int:
        """For every task, length and depth: each draw has as many."""
        return self.material.size.questions * self.material.seeds

    def depths(self) -> list[int]:
        """Places of the fact, in percent of the document's history."""
        count = self.material.size.depths
        return [round(100 * i / (count - 1)) if count > 1 else 50 for i in range(count)]

    def units(self) -> list[str]:
        """``<task>/<length>/<depth>/<number>``."""
        return [
            f"{task}/{length}/{depth}/{i}"
            for task in TASKS
            for length in self.material.lengths
            for depth in self.depths()
            for i in range(self.questions())
        ]

    def document(self, unit: str) -> Haystack:
        """The document of a unit."""
        task, length, depth, _ = unit.split("/")
        texts = self.material.texts
        # Room for the question: the whole prompt has the length asked for.
        tokens = int(length) - 48
        return build_haystack(
            texts.encode, self.material.lines(), tokens, int(depth) / 100, TASKS[task], unit, texts.leading
        )

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """Whether the answer is right, and what it was."""
        asked = self.document(unit)
        ids = asked.ids + self.material.texts.encode(question(asked.key))
        reply = client.behind_cache(asked.ids, ids, ANSWER, {"stop": STOPS})
        return {
            "right": recalled(reply.text, asked.number),
            "finish": reply.finish,
            "text": reply.text,
            "number": asked.number,
            "cached": reply.cached,
        }

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """Over all, by task, by task and length, and by task, length and depth (the heat map)."""
        right, base = rights(answers), None if reference is None else rights(reference)
        found: Figures = {"all": rate(right, base, right), "tasks": {}}
        found["counts"] = counts(len(self.units()), answers.values())
        for task in TASKS:
            of_task = [unit for unit in right if unit.startswith(f"{task}/")]
            if not of_task:
                continue
            rows: Figures = {"all": rate(right, base, of_task), "lengths": {}, "map": {}}
            for length in self.material.lengths:
                units = [unit for unit in of_task if unit.split("/")[1] == str(length)]
                if units:
                    numbers = counts(len(units), (answers[unit] for unit in units))
                    rows["lengths"][str(length)] = rate(right, base, units) | {"counts": numbers}
                cells = {d: [right[u] for u in units if u.split("/")[2] == str(d)] for d in self.depths()}
                rows["map"][str(length)] = {str(d): sum(x) / len(x) for d, x in cells.items() if x}
            found["tasks"][task] = rows
        return found
