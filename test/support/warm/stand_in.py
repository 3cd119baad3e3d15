"""An interpreter for programs that shells start: what they start in turn is forked from a warm process of their own.

The program itself is no child of a process that could fork it, so it imports by itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

from support.warm import interpreter, pool
from support.warm.launch import parsed
from support.warm.rule import front

SCRIPT = """#!{python}
import sys
sys.path[0] = {tests!r}
from support.warm.stand_in import main
main()
"""


@functools.cache
def executable() -> str:
    """Path of that interpreter, of the plain one where nothing is forked. It is there until this process ends."""
    if not pool.wanted():
        return sys.executable
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "python")
    path.write_text(SCRIPT.format(python=sys.executable, tests=str(pool.TESTS)))
    path.chmod(0o755)
    return str(path)


def main() -> None:
    """Body of that interpreter."""
    command = [sys.executable, *sys.argv[1:]]
    _, program = parsed(command, os.getcwd())
    if program is None:
        os.execv(sys.executable, command)
    pool.enable()
    sys.path[:1] = front(program, os.getcwd())
    interpreter.call(command, program)
    interpreter.run(program)
