"""Stand-ins for the servers of ``oscar prove``, and this machine's texts, which are read once for all of its runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oscar_tools.evaluation.prove import run, sizes, texts
from support.prove_runs import TINY, Servers


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(run, "serve", made.serve)
    monkeypatch.setitem(sizes.SIZES, "reduced", TINY)
    return made


@pytest.fixture(autouse=True, scope="session")
def _texts_are_read_once() -> Iterator[None]:
    """Conversations are docstrings of a thousand modules, which depend on the model's chat template alone."""
    read, known = texts.local_documents, {}

    def documents(part: str, render: texts.Render) -> texts.Kinds:
        key = (part, render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
        if key not in known:
            known[key] = read(part, render)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "local_documents", documents)
        yield
