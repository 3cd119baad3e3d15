"""A conversation that grows turn by turn on its cached beginning, with the model's own answers in it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from oscar_tools.calibration.local_text import Messages
from oscar_tools.evaluation.intervals import wilson
from oscar_tools.evaluation.prove.asking import Client
from oscar_tools.evaluation.prove.haystack import KEYS, draw_number, fact
from oscar_tools.evaluation.prove.loops import loops
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Material, Measure
from oscar_tools.evaluation.prove.rates import counts
from oscar_tools.evaluation.prove.sizes import ROOM
from oscar_tools.evaluation.prove.store import Cell
from oscar_tools.evaluation.significance import mcnemar

RECALL, OPEN = 32, 96
"""Tokens of an answer at most: to a question about a number, and to an open question."""
EVERY = 7
"""Every so many turns an open question is asked, so that answers have room to go wrong."""
LONGEST_FILLER = 160
"""Tokens of text that a turn brings besides its fact."""
FEWEST = 8
"""Turns; fewer are no session."""
OPEN_QUESTION = "Explain in a few sentences what the text above is about."


@dataclass(frozen=True)
class Turn:
    """What the user says.

    Attributes:
        content: of the message.
        number: the right answer; None of an open question.
        age: turns since the number was stated.
    """

    content: str
    number: str | None
    age: int


class Session(Measure):
    """Every turn states a new fact between lines of text and asks for one stated earlier, or asks an open question.

    Prompts are the whole conversation through the model's chat template, as a chat client sends them.
    """

    name, title = "session", "Growing session"

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        texts = material.texts
        sample = f"{fact(KEYS[-1], '1234567')}What is the magic number for {KEYS[-1]}?"
        one, two = (
            len(texts.chat_ids([{"role": "user", "content": sample}, {"role": "assistant", "content": "x"}] * n))
            for n in (1, 2)
        )
        frame = two - one
        fixed = frame + (RECALL * (EVERY - 1) + OPEN) / EVERY
        room = material.context - ROOM - max(0, one - frame)
        self.turns = min(material.size.turns, int(room / fixed))
        self.filler = int(min(LONGEST_FILLER, room / max(1, self.turns) - fixed))

    @property
    def remark(self) -> str | None:
        """What the page must say about the length of sessions."""
        if self.turns >= self.material.size.turns:
            return None
        return f"{self.turns} turns instead of {self.material.size.turns}: more do not fit into the model's context"

    def settings(self) -> dict[str, Any]:
        """Sizes."""
        return {
            "sessions": self.material.size.sessions,
            "turns": self.turns,
            "filler": self.filler,
            "recall": RECALL,
            "open": OPEN,
            "every": EVERY,
            "context": self.material.context,
        }

    def units(self) -> list[str]:
        """Numbers of sessions; none where not even :data:`FEWEST` turns fit."""
        return [str(i) for i in range(self.material.size.sessions)] if self.turns >= FEWEST else []

    def prepare(self) -> None:
        """Choose the lines of text."""
        _ = self.lines

    @cached_property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """Lines of text and their tokens."""
        encode = self.material.texts.encode
        return tuple((line, len(encode(line))) for line in self.material.lines()[:3000] if line.strip())

    def script(self, unit: str) -> list[Turn]:
        """What the user says in a session."""
        rng = random.Random(f"session/{unit}")
        keys = list(KEYS[: max(48, 2 * self.turns)])
        rng.shuffle(keys)
        numbers = [draw_number(rng) for _ in range(self.turns)]
        at = rng.randrange(len(self.lines))
        turns = []
        for i in range(self.turns):
            text, used = "", 0
            for _ in range(100):
                line, tokens = self.lines[at % len(self.lines)]
                if used + tokens > self.filler:
                    # A line longer than a turn's share would stop every later turn, too.
                    at += tokens > self.filler
                    break
                text, used, at = text + line, used + tokens, at + 1
            key = keys[i % len(keys)]
            text += fact(key, numbers[i])
            if i % EVERY == EVERY - 1:
                turns.append(Turn(text + OPEN_QUESTION, None, 0))
                continue
            age = rng.randint(0, i)
            asked = keys[(i - age) % len(keys)]
            turns.append(Turn(f"{text}What is the magic number for {asked}?", numbers[i - age], age))
        return turns

    def reach(self) -> int:
        """A session may grow up to the model's context."""
        return self.material.context

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """One whole session."""
        texts = self.material.texts
        stops = {"stop": texts.chat_stops()} if texts.chat_stops() else {}
        messages: Messages = []
        before: list[int] = []
        found = []
        for turn in self.script(unit):
            messages.append({"role": "user", "content": turn.content})
            ids = texts.chat_ids(messages)
            tokens = OPEN if turn.number is None else RECALL
            if len(ids) + tokens > self.material.context:
                break
            reply = client.generate(ids, tokens, stops)
            messages.append({"role": "assistant", "content": reply.text})
            found.append(
                {
                    "right": None if turn.number is None else turn.number in reply.text,
                    "age": turn.age,
                    "text": reply.text,
                    "finish": reply.finish,
                    "loops": loops(reply.ids),
                    "prompt": reply.prompt,
                    "cached": reply.cached,
                    "known": _common(before, ids),
                }
            )
            before = ids + reply.ids
        return {"turns": found}

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """Rates over all turns with paired tests, and what every turn was like."""
        turns = {f"{unit}/{i}": t for unit, answer in answers.items() for i, t in enumerate(answer["turns"])}
        base = {f"{u}/{i}": t for u, answer in (reference or {}).items() for i, t in enumerate(answer["turns"])}
        found: Figures = {"sessions": len(answers), "turns": len(turns)}
        asked = {key: t for key, t in turns.items() if t["right"] is not None}
        # An open question has no verdict that its limit could change.
        wanted = self.material.size.sessions * sum(i % EVERY != EVERY - 1 for i in range(self.turns))
        found["counts"] = counts(wanted, asked.values())
        verdicts = {
            "right": _pair(asked, base, lambda t: t["right"]),
            "cut_off": _pair(turns, base, lambda t: t["finish"] == "length"),
            "loops": _pair(turns, base, lambda t: t["loops"]),
        }
        for name, (own, other) in verdicts.items():
            if not own:
                continue
            found[name] = wilson(sum(own.values()), len(own)).to_json()
            if reference is not None:
                found[name]["p_value"] = mcnemar({k: other[k] for k in own if k in other}, own)
        common = [key for key in turns if key in base]
        if common:
            same = sum(turns[key]["text"] == base[key]["text"] for key in common)
            found["same"] = wilson(same, len(common)).to_json()
        found["by_turn"] = _by_turn(answers)
        return found


def _pair(turns: Answers, base: Answers, verdict: Any) -> tuple[dict[str, bool], dict[str, bool]]:
    return {k: bool(verdict(t)) for k, t in turns.items()}, {k: bool(verdict(t)) for k, t in base.items()}


def _by_turn(answers: Answers) -> list[Figures]:
    """Means over sessions, turn by turn."""
    rows = []
    for i in range(max((len(answer["turns"]) for answer in answers.values()), default=0)):
        here = [answer["turns"][i] for answer in answers.values() if len(answer["turns"]) > i]
        right = [t["right"] for t in here if t["right"] is not None]
        row: Figures = {name: float(np.mean([t[name] for t in here])) for name in ("prompt", "cached", "known")}
        rows.append({"turn": i + 1, "right": float(np.mean(right)) if right else None} | row)
    return rows


def _common(before: list[int], ids: list[int]) -> int:
    """Tokens at the beginning of a prompt that the server has seen, in the turn before."""
    for i, (a, b) in enumerate(zip(before, ids, strict=False)):
        if a != b:
            return i
    return min(len(before), len(ids))
