"""A process that is forked from a warm one is what a new interpreter would be."""

from __future__ import annotations

import _posixsubprocess
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oscar_tools import local_server
from sglang_oscar.rotation_source import on_the_spot
from support.warm import client, pool, preload, rule, stand_in

pytestmark = pytest.mark.skipif(not pool.wanted(), reason="every process is started anew here")
PROPERTIES = (pool.TESTS / "support" / "process_properties.py").read_text()
REPORT_MODULES = "import os, sys; print('torch' in sys.modules, flush=True); os._exit(0)"


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets every process be started anew from now on."""

    def set_back() -> None:
        monkeypatch.setattr(_posixsubprocess, "fork_exec", client.start_anew)
        monkeypatch.setattr(subprocess, "_fork_exec", client.start_anew)

    return set_back


def python(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end."""
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, **options
    )


def warm(**options: Any) -> bool:
    """Whether a process started so has what a warm process has imported."""
    return python("-c", REPORT_MODULES, **options).stdout == "True\n"


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    """A warm process is started for what looks like a command with servers."""
    assert python("-c", REPORT_MODULES, "sglang_oscar").stdout == "True\n"


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, list[str]]:
    """Command lines that print their properties."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(PROPERTIES)
    (tmp_path / "link.py").symlink_to(tmp_path / "folder" / "script.py")
    (tmp_path / "module_by_name.py").write_text(PROPERTIES)
    return {
        "-c": ["-c", PROPERTIES, "one", "-x"],
        "-m": ["-B", "-m", "module_by_name", "--two"] if sys.dont_write_bytecode else ["-m", "module_by_name", "--two"],
        "script": [str(tmp_path / "folder" / "script.py"), "-m", "three"],
        "relative": ["folder/script.py"],
        "link": ["link.py"],
    }


@pytest.mark.parametrize("kind", ["-c", "-m", "script", "relative", "link"])
def test_properties(kind: str, programs: dict[str, list[str]], tmp_path: Path, anew: Any) -> None:
    """Compared with a process that was not forked: everything that a program can ask of its interpreter."""
    env = os.environ | {"SGLANG_OF_THIS_TEST": "é=1", "PYTHONPATH": f"/of/nobody:relative:{tmp_path / 'folder'}"}
    options = {"cwd": tmp_path, "env": env, "start_new_session": kind == "-m", "stdin": subprocess.DEVNULL}
    forked = python(*programs[kind], **options)
    assert warm(**options)
    anew()
    new = python(*programs[kind], **options)
    assert forked.stderr == new.stderr == ""
    got, expected = json.loads(forked.stdout), json.loads(new.stdout)
    # What imports set and add: a new interpreter has it after them.
    assert got["environment"] | expected["environment"] == got["environment"]
    assert not [name for name in got["environment"].keys() - expected["environment"] if name.startswith(rule.FREE)]
    length = len(expected["path"])
    assert got["path"][:length] == expected["path"]
    del got["environment"], expected["environment"], got["path"], expected["path"], got["meta path"]
    del expected["meta path"]
    assert got == expected
    assert got["tested"] == []


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_interpreter_for_shells(kind: str, programs: dict[str, list[str]], tmp_path: Path, anew: Any) -> None:
    """A program sees no difference, except that what it starts is forked."""
    anew()
    answers = []
    for path in (stand_in.executable(), sys.executable):
        env = os.environ | {"PYTHON": path}
        command = ["bash", "-c", '"$PYTHON" "$@"', "bash", *programs[kind]]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
        answers.append(json.loads(done.stdout))
        for name in ("parent", "environment", "meta path"):
            del answers[-1][name]
    assert answers[0] == answers[1]


def test_ends() -> None:
    """Exit statuses, what is said about exceptions, and what runs at the end."""
    assert python("-c", "import sys; sys.exit(7)").returncode == 7
    said = python("-c", "raise SystemExit('reason')")
    assert (said.returncode, said.stderr) == (1, "reason\n")
    failed = python("-c", "import atexit; atexit.register(print, 'at exit'); 1 / 0")
    assert (failed.returncode, failed.stdout) == (1, "at exit\n")
    assert failed.stderr.splitlines()[1:] == [
        '  File "<string>", line 1, in <module>',
        "ZeroDivisionError: division by zero",
    ]
    assert python("-c", "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    assert python("-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM
    assert python("-m", "no_such_module").stderr == f"{sys.executable}: No module named no_such_module\n"
    threads = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('last'))).start()"
    assert python("-c", threads).stdout == "last\n"


def test_streams() -> None:
    """Input, output and errors are the caller's, and reading ends when the process does."""
    copied = python("-c", "import sys; print(sys.stdin.read().upper()); print('x', file=sys.stderr)", input="text")
    assert (copied.stdout, copied.stderr) == ("TEXT\n", "x\n")


def test_interrupt() -> None:
    """SIGINT raises KeyboardInterrupt, unless the parent ignores it, as the tests do in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert python("-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); print(1)").stdout == "1\n"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True)\nimport time\ntime.sleep(100)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors


FAMILY = """
import multiprocessing, os, sys, time
def report(connection):
    start = "warm" if len(sys.modules) > 3000 else "new"
    connection.send((os.getpid(), os.getppid(), os.environ["SGLANG_LATE"], start, sys.argv, __name__))
    time.sleep(1000 if sys.argv[1:] == ["stay"] else 0)
    sys.exit(3)
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["SGLANG_LATE"] = "set before the child"
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=report, args=(theirs,), daemon=True)
    child.start()
    got = ours.recv()
    assert got[:2] == (child.pid, os.getpid()), got
    print(*got[2:4], got[5], child.is_alive(), child.pid, flush=True)
    child.join()
    print(child.exitcode)
"""


@pytest.fixture
def family(tmp_path: Path) -> str:
    path = tmp_path / "family.py"
    path.write_text(FAMILY)
    return str(path)


def test_spawned_children(family: str) -> None:
    """A child has the environment of the moment, the pipes it was given, its parent, and is warm, too."""
    done = python(family)
    assert done.stderr == ""
    first, last = done.stdout.splitlines()
    assert first.rpartition(" ")[0] == "set before the child warm __mp_main__ True"
    assert last == "3"


def gone(process: int) -> bool:
    """Whether a process has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize("how", ["group", "parent"])
def test_killed(how: str, family: str) -> None:
    """The group of a process has its children; and a process dies with what started it where that is asked for."""
    command = [sys.executable, family, "stay"]
    if how == "group":
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[-1])
        assert os.getpgid(child) == process.pid
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
    else:
        program = f"""
import subprocess, sys, time
sys.path[:] = {sys.path!r}
from oscar_tools import local_server
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"],
                         preexec_fn=local_server._die_with_parent, start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait(300)
    deadline = time.monotonic() + 300
    while not gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.stdout.close()


def test_passed_files() -> None:
    """Files keep their numbers; others are closed."""
    reader, writer = os.pipe()
    high = os.dup2(writer, 77)
    program = (
        "import os; os.write(77, b'here'); print([n for n in range(3, 100) if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    done = python("-c", program, pass_fds=[high])
    assert done.stdout == "[77]\n"
    assert os.read(reader, 10) == b"here"
    for number in (reader, writer, high):
        os.close(number)


def test_what_starts_anew(tmp_path: Path) -> None:
    """Modules in front, modules that customize, options, and functions that would run before exec."""
    assert warm()
    (tmp_path / "numpy.py").touch()
    assert not warm(env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert not warm(cwd=tmp_path)
    (tmp_path / "numpy.py").rename(tmp_path / "sitecustomize.py")
    assert not warm(env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert python("-I", "-c", REPORT_MODULES).stdout == "False\n"
    assert not warm(preexec_fn=lambda: None)
    for known in (local_server, on_the_spot):
        assert warm(preexec_fn=known._die_with_parent)


def test_console_script() -> None:
    """An executable that this interpreter runs is a script of it."""
    path = Path(sys.executable).with_name("sglang")
    done = subprocess.run([path, "version"], capture_output=True, text=True, timeout=300, check=False)
    assert "sglang" in done.stdout, done.stderr


def test_missing_things_are_said_as_ever(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        python("-c", "pass", cwd=tmp_path / "none")
    assert "No such file" in python(str(tmp_path / "none.py")).stderr


def test_variables_that_imports_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes through all of them has read none, but SGLang, which renames old ones."""
    for name in ("SGLANG_OF_THIS_TEST", "SGL_OF_THIS_TEST"):
        monkeypatch.setenv(name, "1")
    with preload.reads() as names:
        assert dict(os.environ.items())["SGLANG_OF_THIS_TEST"] == "1"
        os.environ.get("SGLANG_ASKED_FOR")
    assert names == {"SGL_OF_THIS_TEST", "SGLANG_ASKED_FOR"} | {name for name in os.environ if name.startswith("SGL_")}


class Unstarted:
    """A warm process that is none, for whatever launch is like it."""

    def __init__(self, launch: str) -> None:
        self.warm, self.asked, self.closed = launch, 0, False

    def close(self) -> None:
        self.closed = True


def test_what_is_asked_least_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of warm processes there are four, and one for a server here and there takes no other's place for long."""
    monkeypatch.setattr(pool, "Started", Unstarted)
    monkeypatch.setattr(pool, "boots", lambda launch: False)
    monkeypatch.setattr(pool, "fits", lambda launch, warm: launch == warm)
    monkeypatch.setattr(pool, "misfits", lambda launch, warm: "another")
    monkeypatch.setattr(pool, "starts_workers", lambda launch: True)
    monkeypatch.setattr(pool, "environment_for", lambda launch: launch)
    own = pool.Pool()
    often, once = [own.find(launch) for launch in "aabbcc"][::2], [own.find(launch) for launch in "defd"]
    assert [one.closed for one in often] == [False] * 3
    assert [one.closed for one in once] == [True, True, True, False]
    assert own.find("a") is often[0]


def test_warm_processes_of_servers(tmp_path: Path) -> None:
    """They are forked from one with the libraries, and each has its own SGLang; what it forks is as if it were new."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        (folder / "sglang").mkdir(parents=True)
        (folder / "sglang" / "__init__.py").write_text(f"import os; os.environ['SET'] = {folder.name!r}")
    (tmp_path / "print_properties.py").write_text(PROPERTIES)
    program = f"""
import os, subprocess, sys
sys.path[:] = {sys.path!r}
from support.warm import pool
without = "from support.warm import preload; preload.MODULES = ('json',); preload.SGLANG = ('sglang',); main({{"
pool.BOOT = pool.BOOT.replace("main({{", without)
own = pool.Pool()
pool.install(own.find)
for folder in {[str(folder) for folder in folders]!r}:
    env = os.environ | {{"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": folder}}
    command = [sys.executable, {str(tmp_path / "print_properties.py")!r}]
    subprocess.run(command, env=env, check=True)
    subprocess.run(command, env=env, check=True, preexec_fn=lambda: None)  # starts anew
print(len(own._bases), len(own._started), own._bases[0].asked)
"""
    done = python("-c", program)
    assert done.stderr == ""
    *said, last = done.stdout.splitlines()
    assert last == "1 2 0"
    for folder, forked, new in zip(folders, said[::2], said[1::2], strict=True):
        got, expected = json.loads(forked), json.loads(new)
        assert got["environment"] == expected["environment"] | {"SET": folder.name}
        assert got["tested"] == ["sglang"]
        for name in ("environment", "tested", "meta path"):
            del got[name], expected[name]
        assert got == expected


def test_dead_warm_process() -> None:
    """Nothing is started anew in silence when it is gone."""
    environment = dict(os.environ) | {"OF_A_DEAD_ONE": "1"}
    program = f"""
import subprocess, sys
sys.path[:] = {sys.path!r}
from support.warm import pool
# Its warm process imports next to nothing, so that it is there at once.
pool.BOOT = pool.BOOT.replace("main({{", "from support.warm import preload; preload.MODULES = (); main({{")
own = pool.Pool()
pool.install(own.find)
subprocess.run([sys.executable, "-c", "print(1)", "sglang_oscar"], check=True)
own._started[0]._process.kill()
subprocess.run([sys.executable, "-c", "print(2)"], check=True)
"""
    done = python("-I", "-c", program, env=environment)
    assert done.stdout == "1\n"
    assert "the warm process that tests fork from has died" in done.stderr
    assert "status -9" in done.stderr
