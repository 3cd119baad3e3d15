"""Questions of a user's files, in the forms of GSM8K and HumanEval, and when an answer is right."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.code_runner import passes

DIGITS = r"-?\$?(?:\d[\d,]*)?\.?\d+"
NUMBER, FINAL = re.compile(DIGITS), re.compile(rf"####[\s*$\\({{]*({DIGITS})")
"""A number, and one right behind ``####``: models write headings with it, too, such as ``#### Step 2``."""
BLOCK = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class MathQuestion:
    """As in GSM8K: a word problem whose answer is one number.

    Attributes:
        question, number: what is asked, and the right answer.
        limit: tokens of an answer at most.
        runs_code: whether :meth:`right` runs what the model wrote.
    """

    question: str
    number: Decimal
    limit: int = 512
    runs_code: bool = False

    def text(self) -> str:
        """What the prompt says of it, besides its number there."""
        return self.question

    def request(self, number: int) -> str:
        """What asks for it, by its number in the prompt, without repeating it: reasons first, then the result."""
        return f"Solve problem {number}. Reason step by step, then end with the line `#### ` and the final number."

    def right(self, answer: str) -> bool:
        """Whether :func:`last_number` is the number."""
        return last_number(answer) == self.number


@dataclass(frozen=True)
class CodeQuestion:
    """As in HumanEval: the head of a function, which is to be completed, and tests.

    Attributes:
        prompt, entry_point, test: the head, the function's name, and code that defines ``check``.
        limit, runs_code: as in :class:`MathQuestion`.
    """

    prompt: str
    entry_point: str
    test: str
    limit: int = 768
    runs_code: bool = True

    def text(self) -> str:
        """What the prompt says of it, besides its number there."""
        return f"Complete this function.\n```python\n{self.prompt.strip()}\n```"

    def request(self, number: int) -> str:
        """What asks for it, by its number in the prompt, without repeating it."""
        return f"Solve problem {number}. Write the whole function in one ```python block, without explanations."

    def right(self, answer: str) -> bool:
        """Whether the tests pass; runs the answer (:mod:`code_runner`)."""
        return passes(self.program(answer))

    def program(self, answer: str) -> str:
        """The answer's code between what the prompt defines before the function, and the tests."""
        code = code_block(answer, f"def {self.entry_point}")
        head = f"def {self.entry_point}"
        # Imports and helpers of the prompt are there; a body alone belongs behind the whole prompt.
        before = self.prompt[: max(0, self.prompt.rfind(head))] if head in code else self.prompt
        return f"{before}\n{code}\n{self.test}\ncheck({self.entry_point})\n"


Question = MathQuestion | CodeQuestion


def last_number(text: str) -> Decimal | None:
    """The number right behind the last ``####`` that has one, else the last number; None where there is none.

    >>> last_number("6 * 3 = 18, so\\n#### $1,018.00 dollars (2 steps)"), last_number("18 + 1 = 19."), last_number("no")
    (Decimal('1018.00'), Decimal('19'), None)
    """
    found = [*NUMBER.findall(text)[-1:], *FINAL.findall(text)[-1:]]
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def code_block(answer: str, wanted: str) -> str:
    """The first fenced block that has ``wanted`` in it, else the first one, else the whole answer."""
    blocks = BLOCK.findall(answer)
    return next((block for block in blocks if wanted in block), blocks[0] if blocks else answer)


@dataclass(frozen=True)
class QuestionFile:
    """Questions of one form.

    Attributes:
        name: of the file, without endings.
        digest: SHA-256 of the file's lines.
        questions: name -> question, in the file's order, each text once.
    """

    name: str
    digest: str
    questions: dict[str, Question]


def read_questions(path: Path) -> QuestionFile:
    """Read a file of questions.

    Args:
        path: .jsonl or .jsonl.gz; the form is known by the fields of its rows.

    Raises:
        DataError: the file is missing, broken, or of another form; one line.
    """
    ending = next((ending for ending in reversed(ENDINGS) if path.name.endswith(ending)), None)
    if ending is None:
        raise DataError(f"{path}: expected {' or '.join(ENDINGS)}")
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if ending.endswith(".gz") else data).decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    found: dict[str, Question] = {}
    seen: set[str] = set()
    for name, question in _rows(path, lines):
        if question.text() not in seen:
            seen.add(question.text())
            found[name] = question
    if not found:
        raise DataError(f"{path}: holds no questions")
    if len({type(question) for question in found.values()}) > 1:
        raise DataError(f"{path}: holds questions of two forms; give a file for each")
    return QuestionFile(path.name.removesuffix(ending), hashlib.sha256(lines.encode()).hexdigest(), found)


def _rows(path: Path, lines: str) -> Iterator[tuple[str, Question]]:
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise DataError(f"{path}: line {number} is no JSON") from None
        yield str(number), _question(row, f"{path}: line {number}")


def _question(row: Any, where: str) -> Question:
    fields = row if isinstance(row, dict) else {}
    text = {name: value for name, value in fields.items() if isinstance(value, str)}
    if {"prompt", "entry_point", "test"} <= set(text):
        return CodeQuestion(text["prompt"], text["entry_point"], text["test"])
    if {"question", "answer"} <= set(text):
        _, mark, behind = text["answer"].rpartition("####")
        number = last_number(behind) if mark else None
        if number is None:
            raise DataError(f"{where}: the answer has no number behind ####")
        return MathQuestion(text["question"].strip(), number)
    raise DataError(
        f"{where}: neither of HumanEval's form (prompt, entry_point, test) nor of GSM8K's (question, answer)"
    )
