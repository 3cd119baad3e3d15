"""Exact recall of a number hidden in a cached document, by length and depth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_oscar.evaluation.intervals import wilson
from sglang_oscar.evaluation.prove.asking import Client
from sglang_oscar.evaluation.prove.haystack import Haystack, build_haystack, question, recalled
from sglang_oscar.evaluation.prove.measures.base import Answer, Answers, Figures, Measure
from sglang_oscar.evaluation.prove.store import Cell
from sglang_oscar.evaluation.significance import mcnemar

TASKS = {"needle": 0, "multi-key": 3}
"""Task -> facts of other keys in the same document, as in RULER's single needle and multi-key tasks."""
ANSWER = 12
"""Tokens; a number has 7 digits."""


class Retrieval(Measure):
    """A document is cached by a first request; the question arrives behind it."""

    name, title = "retrieval", "Needle and multi-key retrieval"

    def settings(self) -> dict[str, Any]:
        """Sizes and tasks."""
        size = self.material.size
        return {
            "lengths": self.material.lengths,
            "depths": size.depths,
            "questions": size.questions,
            "tasks": TASKS,
            "answer": ANSWER,
        }

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
            for i in range(self.material.size.questions)
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
        reply = client.behind_cache(asked.ids, ids, ANSWER)
        return {
            "right": recalled(reply.text, asked.number),
            "text": reply.text,
            "number": asked.number,
            "cached": reply.cached,
        }

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """Over all, by task, by task and length, and by task, length and depth (the heat map)."""
        right = {unit: bool(answer["right"]) for unit, answer in answers.items()}
        base = None if reference is None else {unit: bool(answer["right"]) for unit, answer in reference.items()}
        found: Figures = {"all": _rate(right, base, right), "tasks": {}}
        for task in TASKS:
            of_task = [unit for unit in right if unit.startswith(f"{task}/")]
            if not of_task:
                continue
            rows: Figures = {"all": _rate(right, base, of_task), "lengths": {}, "map": {}}
            for length in self.material.lengths:
                units = [unit for unit in of_task if unit.split("/")[1] == str(length)]
                if units:
                    rows["lengths"][str(length)] = _rate(right, base, units)
                cells = {d: [right[u] for u in units if u.split("/")[2] == str(d)] for d in self.depths()}
                rows["map"][str(length)] = {str(d): sum(x) / len(x) for d, x in cells.items() if x}
            found["tasks"][task] = rows
        return found


def _rate(right: dict[str, bool], base: dict[str, bool] | None, units: Iterable[str]) -> Figures:
    chosen = {unit: right[unit] for unit in units}
    found: Figures = {"questions": len(chosen), "right": wilson(sum(chosen.values()), len(chosen)).to_json()}
    if base is not None:
        found["p_value"] = mcnemar({unit: base[unit] for unit in chosen if unit in base}, chosen)
    return found
