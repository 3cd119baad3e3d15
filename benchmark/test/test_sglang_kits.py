"""SGLang's kits against two servers: what counts as lost, and that the kits are still where they are looked for."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import sglang_kits
from sglang_kits import ABSENT, FAILED, KITS, PASSED, Outcome, lost, run


class Cases(unittest.TestCase):
    """One test of each end."""

    def passes(self) -> None:
        print("not shown")

    def fails(self) -> None:
        self.fail("1 is not 2")

    def breaks(self) -> None:
        raise ConnectionError("the server is gone")

    def skips(self) -> None:
        self.skipTest("no reason")


def test_ends(capsys: pytest.CaptureFixture[str]) -> None:
    ends = {name: run(Cases(name)) for name in ("passes", "fails", "breaks", "skips")}
    assert {name: end.result for name, end in ends.items()} == {
        "passes": PASSED,
        "fails": FAILED,
        "breaks": FAILED,
        "skips": ABSENT,
    }
    assert "1 is not 2" in ends["fails"].error
    assert "the server is gone" in ends["breaks"].error
    assert capsys.readouterr().out == ""


def test_lost() -> None:
    """A test that BF16 fails is not held against int2; one that int2 never ran is."""
    bf16 = {name: Outcome(PASSED) for name in "abc"} | {"d": Outcome(FAILED)}
    int2 = {"a": Outcome(PASSED), "b": Outcome(FAILED), "d": Outcome(FAILED)}
    assert lost(bf16, int2) == ["b", "c"]


@pytest.mark.parametrize("kit", KITS)
def test_a_kit_is_found(kit: str) -> None:
    server = SimpleNamespace(url="http://127.0.0.1:1", process=None)
    tests = sglang_kits.tests_of(kit, server, "model")  # type: ignore[arg-type]
    assert tests is None or unittest.defaultTestLoader.getTestCaseNames(tests)
