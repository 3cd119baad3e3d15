"""What the start of an interpreter sets, for a forked process: sys.argv, sys.path, os.environ, ``__main__`` and so on.

Not the seed of ``hash``: all processes forked from one warm process share it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import runpy
import sys
import types
from multiprocessing import process

from support.warm.launch import Launch, Program
from support.warm.rule import AGAIN, Warm, front

_mains: list[types.ModuleType] = []


def become(launch: Launch, warm: Warm) -> None:
    """Make this process, forked from a warm one, what a new interpreter would be that was started so."""
    assert launch.program is not None
    place(launch, warm)
    sys.path[:0] = front(launch.program, launch.cwd)
    # These two were made when multiprocessing was imported.
    process.ORIGINAL_DIR = launch.cwd  # type: ignore[attr-defined]
    process.current_process().authkey = os.urandom(32)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # random does so by itself
    if (scheduler := sys.modules.get("sglang.srt.managers.scheduler")) is not None:
        for variable, kept in AGAIN.items():
            setattr(scheduler, kept, getattr(scheduler.envs, variable).get())
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    call(launch.command, launch.program)


def place(launch: Launch, warm: Warm) -> None:
    """Set os.environ and sys.path, but for what a program puts in front.

    What imports set and add is there already, as it is in a new interpreter after these imports.
    """
    os.environ.clear()
    os.environ.update(launch.environment | warm.imported)
    sys.path[:] = [*_path(warm.path), *warm.added_path]
    importlib.invalidate_caches()


def call(command: list[str], program: Program) -> None:
    """Let this process's command line be ``command``, and forget the names of this facility: they are the tests'."""
    sys.argv[:] = [program.what if program.kind == "script" else program.kind, *program.arguments]
    sys.orig_argv[:] = command
    for name in [name for name in sys.modules if name.partition(".")[0] == "support"]:
        del sys.modules[name]


def run(program: Program) -> None:
    """Run a program as ``__main__``; ends as the interpreter would, with SystemExit where it ends badly."""
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __annotations__={}, __builtins__=sys.modules["builtins"], __loader__=importlib.machinery.BuiltinImporter
    )
    _mains.append(sys.modules["__main__"])  # it must not be cleared: the stack of this call begins there
    sys.modules["__main__"] = main
    try:
        if program.kind == "-m":
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        elif program.kind == "-c":
            exec(compile(program.what, "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            _run_script(program.what, main)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _run_script(path: str, main: types.ModuleType) -> None:
    file = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    main.__dict__.update(
        __file__=file, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", file)
    )
    with open(path, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _path(rest: list[str]) -> list[str]:
    """sys.path. PYTHONPATH stands before the standard library, but behind what .pth files put at the very front."""
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    library = rest.index(os.path.join(sys.base_prefix, sys.platlibdir, "python{}{}.zip".format(*sys.version_info)))
    return [*rest[:library], *dict.fromkeys([*map(os.path.abspath, paths), *rest[library:]])]
