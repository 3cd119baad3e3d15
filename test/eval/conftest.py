"""Stand-ins for the servers of ``oscar prove``."""

from __future__ import annotations

import pytest

from oscar_tools.evaluation.prove import run, sizes
from support.prove_runs import TINY, Servers


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(run, "serve", made.serve)
    monkeypatch.setitem(sizes.SIZES, "reduced", TINY)
    return made
