"""How many questions of a run were asked, answered, and cut off: a wrong answer is one thing, none is another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CUT_OFF = ("max_tokens", "model_length", "length")
"""What the harness calls the end of an answer at a limit of tokens, instead of SGLang's finish_reason "length"."""
TOLERATED = 0.01
"""Share of answers that may be cut off without a warning."""


@dataclass(frozen=True)
class Answers:
    """Counts of questions.

    Attributes:
        asked: all.
        answered: those whose answer ended by itself and is not empty.
        cut_off: those whose answer ended at its limit of tokens. What is left of ``asked`` came back empty.
    """

    asked: int
    answered: int
    cut_off: int

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.asked + other.asked, self.answered + other.answered, self.cut_off + other.cut_off)

    def __str__(self) -> str:
        return f"{self.asked} asked, {self.answered} answered, {self.cut_off} cut off"

    def to_json(self) -> dict[str, int]:
        """As JSON values."""
        return asdict(self)

    @property
    def warning(self) -> str | None:
        """What to tell the reader of a score; None where next to no answer was cut off and some question answered."""
        if self.answered == 0:
            why = "all answers were cut off" if self.cut_off == self.asked else f"none was answered ({self})"
            return f"{why}: this is no score; raise --max-tokens or look at the server"
        if self.cut_off > TOLERATED * self.asked:
            return f"{self.cut_off} of {self.asked} answers were cut off and count as they stand; raise --max-tokens"
        return None


def count(folder: Path, asked: int) -> Answers:
    """Counts of a finished run, from the predictions that the harness left.

    Args:
        folder: of the run.
        asked: questions that were scored.
    """
    ends: dict[str, tuple[str, bool]] = {}
    for path in sorted((folder / "predictions").rglob("*.jsonl")):
        # Not splitlines(): answers may hold other characters that end a line, which JSON leaves as they are.
        for line in filter(str.strip, path.read_text(encoding="utf-8").split("\n")):
            row = json.loads(line)
            # A run that was continued may hold a question twice; the harness counts one.
            ends[f"{path.stem}/{row['index']}"] = _end(row.get("model_output") or {})
    reasons = list(ends.values())
    cut = sum(reason in CUT_OFF for reason, _ in reasons)
    return Answers(asked, sum(said and reason not in CUT_OFF for reason, said in reasons), cut)


def _end(output: dict[str, Any]) -> tuple[str, bool]:
    """Why an answer ended, and whether it says anything besides reasoning."""
    choice: dict[str, Any] = next(iter(output.get("choices") or ()), {})
    said = any(text.strip() for text in _texts((choice.get("message") or {}).get("content")))
    return str(choice.get("stop_reason")), said


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        yield str(part.get("text") or "")
