"""Code that a model wrote is run with limits, and only what passes its tests is right."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from oscar_tools.evaluation.prove import code_runner
from oscar_tools.evaluation.prove.code_runner import passes
from oscar_tools.evaluation.prove.questions import CodeQuestion

ADD = CodeQuestion(
    'from typing import List\n\ndef helper(x):\n    return x\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n',
    "add",
    "def check(candidate):\n    assert candidate(helper(1), 2) == 3\n",
)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", True),
        ("def add(a, b):\n    return a + b", True),
        ("    return a + b\n", True),
        ("```\nprint(add)\n```\nor\n```py\ndef add(a, b) -> List[int]:\n    return a + b\n```", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```python\ndef add(a, b):\n    return a +\n```", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_the_tests_decide(answer: str, right: bool) -> None:
    assert ADD.right(answer) is right


GUESS = """
import os
for fd in range(64):
    try:
        os.write(fd, b"0" * 32)
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "assert False",
        "raise KeyboardInterrupt",
        GUESS,
        "x = bytearray(2**31)",
        "open('big', 'wb').write(b'0' * 2**25)",
        "files = [open('f', 'a') for _ in range(100)]",
        "assert input()",
        "import sys; assert sys.stdin.read()",
        "import os; assert os.environ['HOME']",
    ],
)
def test_what_does_not_reach_the_end_is_wrong(program: str) -> None:
    assert not passes(program)


def test_a_flood_of_output_is_no_fault(capfd: pytest.CaptureFixture[str]) -> None:
    assert passes("import sys\nfor _ in range(2000):\n    print('x' * 10000)\n    sys.stderr.write('y' * 100)")
    assert capfd.readouterr() == ("", "")


def test_endless_code_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runner, "WALL", 0.5)
    begin = time.monotonic()
    assert not passes("while True: pass")
    assert not passes("import time\ntime.sleep(60)")
    assert time.monotonic() - begin < 50


def test_what_code_starts_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes cannot be started, or where the user may (root) end together, also those that catch signals."""
    monkeypatch.setattr(code_runner, "WALL", 3.0)
    alive = tmp_path / "alive"
    program = f"""
import os, signal, time
for _ in range(3):
    try:
        os.fork()
    except OSError:
        break
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(alive)!r}, "a").write(f"{{os.getpid()}}\\n")
time.sleep(60)
"""
    assert not passes(program)
    pids = [int(line) for line in alive.read_text().split()]
    assert pids
    for pid in pids:
        end = time.monotonic() + 60
        while _runs(pid) and time.monotonic() < end:
            time.sleep(0.02)
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runner.tempfile, "tempdir", str(tmp_path))
    assert passes("import os\nassert os.listdir() == ['program.py']\nopen('a', 'w').write('b')\nos.mkdir('c')")
    assert os.listdir(tmp_path) == []
