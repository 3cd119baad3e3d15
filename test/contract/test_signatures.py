"""No function of the packages or the benchmarks takes more than eight parameters: what belongs together is a
record.

Others write some signatures: a command line has as many options as it has, a hook takes what SGLang gives the original,
a stand-in takes what its original takes, and Triton knows no records.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
FOLDERS = {"python": 90, "benchmark": 90, "kernels": 40, "rotation": 50}
"""Packages, and how many files they have at least."""
MOST = 8


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Those that a caller gives; neither the object of a method nor the rest of a call."""
    found = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [one for one in found if one.arg not in ("self", "cls")]


def is_written_by_others(node: ast.FunctionDef | ast.AsyncFunctionDef, found: list[ast.arg]) -> bool:
    """Whether they are options of a command line, those of a hook around an original, or a kernel's."""
    if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return True
    options = any("typer." in ast.unparse(one.annotation) for one in found if one.annotation is not None)
    return options or found[0].arg == "original"


def too_many(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of functions with more than that are not written by others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = parameters(node)
            if len(found) > MOST and not is_written_by_others(node, found):
                yield node.lineno, node.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_takes_more_than_eight(folder: str) -> None:
    files = [path for path in sorted((TOP / folder).rglob("*.py")) if "stand_in" not in path.parts]
    assert len(files) > FOLDERS[folder]
    assert [f"{path}: {found}" for path in files for found in too_many(ast.parse(path.read_text()))] == []


NINE = ", ".join("abcdefghi")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (f"def f({NINE}): pass", ["f"]),
        (f"class C:\n    def f(self, {NINE}): pass", ["f"]),
        ("class C:\n    def f(self, a, b, *rest, c, d, e, f, g, h, **more): pass", []),
        (f"def around_f(original, {NINE}): pass", []),
        (f"@triton.jit\ndef f({NINE}): pass", []),
        (f"def main({NINE}, j: Annotated[int, typer.Option()] = 0): pass", []),
        (f"def g():\n    async def f({NINE}, *, original): pass", ["f"]),
    ],
)
def test_what_is_found(source: str, named: list[str]) -> None:
    assert [name for _, name in too_many(ast.parse(source))] == named
