"""Fields of ServerArgs in every supported release, read from the sources: what a release adds is a line more.

    python test/support/server_arguments.py

writes them to test/data/server_arguments.txt, one ``name = default [first release - last release]`` a line. A release
that is added shows in the difference of that file what it can do that nobody has judged yet.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.releases import SGLANG_VERSIONS, tree
from support.syntax import SourceTree

FILE = Path(__file__).parents[1] / "data" / "server_arguments.txt"
HEADER = "# Fields of ServerArgs and their defaults, by release. Written by test/support/server_arguments.py.\n"


def fields(sources: SourceTree) -> dict[str, str]:
    """Defaults of the fields by name, as written in the sources; ``required`` without one."""
    module = sources.module("sglang.srt.server_args")
    assert module is not None
    own = module.names["ServerArgs"]
    found = dict(annotated(own)) if isinstance(own, ast.ClassDef) else {}
    if found:
        return found
    # Later releases collect the fields from one class a namespace.
    root = sources.root / "sglang/srt/arg_groups/fields"
    for path in sorted(root.glob("*.py")):
        group = sources.module(f"sglang.srt.arg_groups.fields.{path.stem}")
        for statement in group.names.values() if group else ():
            if isinstance(statement, ast.ClassDef):
                found |= dict(annotated(statement))
    return found


def annotated(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Fields of a class, those that are derived from others left out."""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if ast.unparse(statement.annotation).startswith(("ClassVar", "typing.ClassVar")):
                continue
            yield statement.target.id, "required" if statement.value is None else ast.unparse(statement.value)


def listing(versions: tuple[str, ...] = SGLANG_VERSIONS) -> str:
    """The content of the file."""
    spans: dict[tuple[str, str], list[str]] = {}
    for version in versions:
        for field, default in fields(SourceTree(tree(version))).items():
            spans.setdefault((field, default), []).append(version)
    lines = [
        f"{field} = {default} [{seen[0]} - {seen[-1]}]\n"
        for (field, default), seen in sorted(spans.items(), key=lambda item: (item[0][0], item[1][0]))
    ]
    return HEADER + "".join(lines)


def main() -> None:
    """Write the file."""
    FILE.write_text(listing())
    print(f"{FILE}: {len(FILE.read_text().splitlines()) - 1} lines")


if __name__ == "__main__":
    main()
