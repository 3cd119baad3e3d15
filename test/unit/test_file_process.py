"""The process that moves files of pages, where much is to be moved, or nothing moves: its caller always gets on."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_oscar.features.tiers import line_process
from sglang_oscar.features.tiers.file_process import HANGING, FileProcess
from sglang_oscar.features.tiers.line_process import LineProcess
from sglang_oscar.features.tiers.page_files import FAILED, MISSING, OK, Job, Outcome
from support.stored_pages import KEYS, LAYOUT, Pool, pages

MANY = 4000
HANG = 60.0
"""Seconds for what takes milliseconds, so that a hang is a failure."""
Do = pytest.mark.parametrize("do", ["write", "read", "look"])


@pytest.fixture
def process() -> Iterator[FileProcess]:
    """Of a host tier of eight pages, four of which fit its memory at a time."""
    pool = Pool()
    for number, page in enumerate(pages(8)):
        pool.pages.set_page(number, page)
    process = FileProcess(pool.pages, 8 * LAYOUT.page_bytes, HANG)
    yield process
    process.close()


def move(process: FileProcess, do: str, paths: list[str]) -> list[Outcome]:
    """Move pages, whichever: of each path one."""
    if do == "look":
        return process.look(paths)
    return getattr(process, do)([at % 8 for at in range(len(paths))], paths, [KEYS[0]] * len(paths))  # type: ignore[no-any-return]


def popen(process: FileProcess) -> subprocess.Popen[bytes]:
    assert process._process is not None
    return process._process._process


def stop(process: FileProcess) -> subprocess.Popen[bytes]:
    """Start the process that moves files, and let it hang: it has little time to answer."""
    process.look(["x"])
    assert process._process is not None
    process._process._seconds = 0.2
    os.kill(process._process.pid, signal.SIGSTOP)
    return process._process._process


@Do
def test_many_pages_with_long_paths_and_long_errors(do: str, tmp_path: Path) -> None:
    """Lines of jobs and of outcomes that fit no pipe, in both directions at once."""
    pool = Pool()
    process = FileProcess(pool.pages, 2 * MANY // 3 * LAYOUT.page_bytes, HANG)
    paths = [str(tmp_path / "missing" / ("x" * 200) / f"{at}.bin") for at in range(MANY)]
    outcomes = move(process, do, paths)
    process.close()
    assert {of.result for of in outcomes} == {FAILED if do == "write" else MISSING}
    if do == "write":
        assert all("No such file or directory" in of.why and "x" * 200 in of.why for of in outcomes)


def test_an_error_of_one_page_takes_no_other_along(process: FileProcess, tmp_path: Path) -> None:
    """Whatever it is: a name that is too long, or that no file can have."""
    paths = [str(tmp_path / name) for name in ("a", "y" * 5000, "null\0", "b")]
    assert [of.result for of in move(process, "write", paths)] == [OK, FAILED, FAILED, OK]
    assert [of.result for of in move(process, "read", paths)] == [OK, FAILED, FAILED, OK]


def test_no_room_for_files(process: FileProcess, tmp_path: Path) -> None:
    """As on a disk that is full: nothing unfinished is left, and pages are written once there is room."""
    process.look(["x"])
    resource.prlimit(popen(process).pid, resource.RLIMIT_FSIZE, (LAYOUT.page_bytes // 2, resource.RLIM_INFINITY))
    paths = [str(tmp_path / f"{at}.bin") for at in range(20)]
    outcomes = move(process, "write", paths)
    assert {of.result for of in outcomes} == {FAILED}
    assert all("File too large" in of.why for of in outcomes)
    assert not list(tmp_path.iterdir())
    resource.prlimit(popen(process).pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert {of.result for of in move(process, "write", paths)} == {OK}


@Do
@pytest.mark.parametrize("longer", [1, 1000])
def test_a_process_that_does_not_answer_is_killed(
    do: str, longer: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it has read what it should do, or behind: it is said once, and the next pages are moved by another one."""
    process = FileProcess(Pool().pages, seconds=HANG)
    stopped = stop(process)
    paths = [str(tmp_path / ("z" * 100) / f"{at}") for at in range(longer)]
    assert {of.result for of in move(process, do, paths)} == {FAILED}
    assert stopped.returncode == -signal.SIGKILL
    (said,) = [record.getMessage() for record in caplog.records]
    assert "gave no answer for 0.2 seconds and was killed; the next pages start another" in said
    assert move(process, "write", [str(tmp_path / "a")]) == [Outcome(OK)]
    process.close()


def test_a_process_that_cannot_be_killed_is_not_joined_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the operating system waits for a disk: pages fail at once and in silence, until it is gone."""
    monkeypatch.setattr(line_process, "KILL_SECONDS", 0.01)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)
    process = FileProcess(Pool().pages, seconds=HANG)
    stopped = stop(process)
    for _ in range(3):
        (outcome,) = move(process, "write", [str(tmp_path / "a")])
        assert outcome.result == FAILED
    assert outcome.why == HANGING
    assert len(caplog.records) == 1
    os.kill(stopped.pid, signal.SIGKILL)
    stopped.wait(HANG)
    assert move(process, "write", [str(tmp_path / "a")]) == [Outcome(OK)]
    process.close()


def test_a_process_that_dies_in_the_middle(process: FileProcess, tmp_path: Path) -> None:
    """Pages of the parts that it had done count as moved, the others as failed."""
    made = tmp_path / "made"
    made.mkdir()
    paths = [str(made / f"{at}") for at in range(4)] + [str(tmp_path / "fifo")] * 4 + [str(made / "last")]
    os.mkfifo(paths[4])
    assert {of.result for of in move(process, "write", paths[:4])} == {OK}
    doomed = popen(process)
    killer = [sys.executable, "-c", f"import os; held = open({paths[4]!r}, 'wb'); os.kill({doomed.pid}, 9)"]
    with subprocess.Popen(killer):
        outcomes = move(process, "read", paths)
    assert [of.result for of in outcomes] == [OK] * 4 + [FAILED] * 5
    assert "ended with -9" in outcomes[-1].why


def test_a_process_that_answers_at_length_before_it_reads() -> None:
    """Neither side waits for the other to read, however many lines are on their way."""
    program = (
        "import sys\n"
        "for _ in range(20): print('a' * 100_000, flush=True)\n"
        "for line in sys.stdin: print(len(line), flush=True)\n"
    )
    process = LineProcess([sys.executable, "-c", program], HANG)
    for _ in range(20):
        process.send(b"b" * 300_000)
    assert [process.receive() for _ in range(20)] == [b"a" * 100_000] * 20
    assert [process.receive() for _ in range(20)] == [b"300001"] * 20
    assert process.end(HANG) == 0


@pytest.mark.parametrize("killed", ["while it wrote a line", "before it read an answer"])
def test_of_a_server_that_is_killed(killed: str, tmp_path: Path) -> None:
    """The process ends, says nothing in what may be the server's log, and leaves nothing that is not whole."""
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, LAYOUT.page_bytes)
    sizes = (descriptor, LAYOUT.page_bytes, LAYOUT.item_bytes)
    command = [sys.executable, "-m", "sglang_oscar.features.tiers.page_files", *map(str, sizes)]
    line = json.dumps([Job("write", 0, str(tmp_path / "page"), KEYS[0])]).encode() + b"\n"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(descriptor,)
    ) as process:
        os.close(descriptor)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if answers_nobody := killed == "before it read an answer":
            process.stdout.close()
        process.stdin.write(b"[]\n" + (line if answers_nobody else line[:-9]))
        process.stdin.close()
        assert process.wait(HANG) == (-signal.SIGPIPE if answers_nobody else 0)
        assert process.stderr.read() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["page"] * answers_nobody
    if answers_nobody:
        assert (tmp_path / "page").stat().st_size == LAYOUT.page_bytes
