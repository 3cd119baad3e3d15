"""Functions of Python modules that a model can be asked to repeat, and how alike its answer is."""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from oscar_tools.evaluation.prove.questions import code_block

FEWEST, MOST = 5, 40
"""Lines of a function."""
STEP = 8
"""Lines whose tokens are counted at once; a document is cut behind them."""
NAMED = re.compile(r"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Function:
    """A function of a module.

    Attributes:
        name: no other function or class of the module has it.
        begin, end: characters of the module that it takes, decorators left out.
    """

    name: str
    begin: int
    end: int


def functions(module: str) -> list[Function]:
    """Functions and methods of a module of 5 to 40 lines whose names are unique in it, in order; of a text that is no
    Python, none."""
    try:
        tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return []
    uses = Counter(NAMED.findall(module))
    lines = module.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    return [
        Function(node.name, starts[node.lineno - 1], min(starts[node.end_lineno or 0], len(module)))
        for node in sorted(
            (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)),
            key=lambda x: x.lineno,
        )
        if FEWEST <= (node.end_lineno or 0) - node.lineno + 1 <= MOST and uses[node.name] == 1
    ]


def modules(sources: Iterable[str], length: int, count: Callable[[str], int]) -> Iterator[tuple[str, list[Function]]]:
    """Documents of sources, one after the other until they fill a length; what does not fit of the last is left out.

    Args:
        sources: Python files.
        length: tokens of a document at most; it is filled up to :data:`STEP` lines.
        count: tokens of a text.

    Yields:
        a document, and its functions.
    """
    whole, kept, size = "", 0, 0
    for source in sources:
        whole += source if source.endswith("\n") else f"{source}\n"
        lines = whole[kept:].splitlines(keepends=True)
        for i in range(0, len(lines), STEP):
            part = "".join(lines[i : i + STEP])
            size += count(part)
            if size > length:
                yield whole[:kept], [function for function in functions(whole) if function.end <= kept]
                whole, kept, size = "", 0, 0
                break
            kept += len(part)


def plain(code: str) -> str:
    """Code without indentation that all lines share, without space at line ends and empty lines around it."""
    lines = [line.rstrip() for line in code.expandtabs().splitlines()]
    return textwrap.dedent("\n".join(lines)).strip("\n")


def similarity(answer: str, name: str, code: str) -> float:
    """How alike the code of an answer is to the function that was asked for: 0 to 1 (difflib, by character).

    Args:
        answer: a model's, with or without a fenced block.
        name: of the function.
        code: its lines.
    """
    block = code_block(answer, f"def {name}")
    found = re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", block, re.MULTILINE)
    # Decorators are not asked for.
    given = plain(block[found.start() :] if found else block)
    return difflib.SequenceMatcher(None, plain(code), given, autojunk=False).ratio()
