"""Tiny data sets in the exact formats of the public ones."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any


def gpqa_rows() -> list[dict[str, Any]]:
    """Columns of Idavidrein/gpqa that harnesses read."""
    wrong = ("two", "five", "nine")
    return [
        {
            "Question": f"How many corners has a polygon of {n} sides, number {n}?",
            "Correct Answer": str(n),
            **{f"Incorrect Answer {i + 1}": text for i, text in enumerate(wrong)},
            "Record ID": f"rec{n}",
            "Subdomain": "Geometry",
        }
        for n in (3, 4, 6, 8)
    ]


def humaneval_rows() -> list[dict[str, Any]]:
    """Rows of openai/openai_humaneval."""
    return [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def add_{n}(x: int) -> int:\n    """Return x + {n}."""\n',
            "canonical_solution": f"    return x + {n}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
            "entry_point": f"add_{n}",
        }
        for n in (1, 2)
    ]


def packed(tests: list[dict[str, str]]) -> str:
    """Private tests as livecodebench/code_generation_lite has them: JSON, pickled, compressed, in base 64."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def livecodebench_rows() -> list[dict[str, Any]]:
    """Rows of livecodebench/code_generation_lite, one for standard input and one for a function."""
    common = {
        "platform": "atcoder",
        "contest_id": "abc1",
        "contest_date": "2025-02-01T00:00:00",
        "difficulty": "easy",
    }
    return [
        common
        | {
            "question_title": "Double",
            "question_content": "Read an integer and print its double.",
            "question_id": "q1",
            "starter_code": "",
            "public_test_cases": json.dumps([{"input": "3\n", "output": "6\n", "testtype": "stdin"}]),
            "private_test_cases": packed([{"input": "5\n", "output": "10\n", "testtype": "stdin"}]),
            "metadata": "{}",
        },
        common
        | {
            "question_title": "Triple",
            "question_content": "Return three times n.",
            "question_id": "q2",
            "starter_code": "class Solution:\n    def triple(self, n: int) -> int:\n        ",
            "public_test_cases": json.dumps([{"input": "3", "output": "9", "testtype": "functional"}]),
            "private_test_cases": json.dumps([{"input": "5", "output": "15", "testtype": "functional"}]),
            "metadata": json.dumps({"func_name": "triple"}),
        },
    ]


def aime_rows() -> list[dict[str, Any]]:
    """Rows of math-ai/aime25."""
    return [{"problem": f"Find {n} + {n}.", "answer": str(2 * n), "id": str(n)} for n in (10, 21, 35)]


def math500_rows() -> list[dict[str, Any]]:
    """Rows of HuggingFaceH4/MATH-500, every level."""
    return [
        {
            "problem": f"Compute ${n}^2$.",
            "solution": f"It is $\\boxed{{{n * n}}}$.",
            "answer": str(n * n),
            "subject": "Algebra",
            "level": level,
            "unique_id": f"test/algebra/{n}.json",
        }
        for level, n in enumerate((2, 3, 4, 5, 6), 1)
    ]


ROWS = {
    "gpqa": gpqa_rows,
    "humaneval": humaneval_rows,
    "lcb_v6": livecodebench_rows,
    "aime25": aime_rows,
    "math500": math500_rows,
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path
