"""Classes of models that a release of SGLang registers, from its sources: some cannot be imported without a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def classes(models: Path) -> Iterator[str]:
    """Names in ``EntryClass`` of every module.

    Args:
        models: the folder ``sglang/srt/models``.
    """
    for file in sorted(models.rglob("*.py")):
        text = file.read_text(encoding="utf-8-sig")
        begin = re.search("^EntryClass\\b", text, re.MULTILINE)
        if begin is None:
            continue
        # What stands before it takes most of the time.
        for node in ast.parse(text[begin.start() :]).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "EntryClass" for target in targets):
                yield from (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
