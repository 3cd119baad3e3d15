"""The reader of source trees, which the contract with SGLang rests on, finds what is there and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.syntax import SourceTree

FILES = {
    "package/__init__.py": "from package.stars import *\nfrom .moved import function as renamed\n",
    "package/stars.py": "if True:\n    shared = 1\n",
    "package/moved.py": "def function(a, *rest, key, **options): ...\n",
    "package/records.py": """
from package.base import Base

class Record(Base):
    field: int = 0
    def set(self):
        self.one, self.two = 1, 2
        with self.lock:
            self.three: int = 3

Record = remade(Record)
""",
    "package/base.py": "class Base:\n    def __init__(self, size): self.size = size\n    def inherited(self): ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return SourceTree(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "package",
        "package.base",
        "package.shared",
        "package.renamed",
        "package.records.Base.inherited",
        "package.records.Record.inherited",
        "package.records.Record.set",
        "package.records.Record.field",
    ],
)
def test_what_is_there(tree: SourceTree, place: str) -> None:
    assert tree.has(place)


@pytest.mark.parametrize(
    "place",
    [
        "nowhere",
        "package.nowhere",
        "package.function",
        "package.base.Base.set",
        "package.records.Record.nowhere",
        "package.moved.function.a",
    ],
)
def test_what_is_not(tree: SourceTree, place: str) -> None:
    assert not tree.has(place)


def test_attributes_and_parameters(tree: SourceTree) -> None:
    expected = {"__init__", "field", "inherited", "one", "set", "size", "three", "two"}
    assert tree.attributes("package.records.Record") == expected
    assert tree.parameters("package.renamed") == ["a", "key", "rest", "options"]
    assert tree.parameters("package.records.Record") == ["self", "size"]
    for ask in (tree.attributes, tree.parameters):
        with pytest.raises(KeyError):
            ask("package.records.Nothing")
