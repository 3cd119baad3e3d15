"""Which launches may be forked from a warm process, and which have to start anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from support.warm import preload
from support.warm.launch import Launch, Program

READ = ("SGLANG_", "SGL_", "TLLM_", "DG_JIT_", "MODELSCOPE_")
"""Beginnings of names of variables that count only where a warm process has read them while it imported."""
FREE = (
    # Read by this project and plugins of its tests, which a warm process has not imported.
    *("OSCAR_", "DUMP_KVCACHE", "CPU_COMPILE_", "GPU_CHECKS", "EMBEDDING_FAULT", "LATE_HOST_", "LOSSLESS_ROWS_"),
    "ORACLE_",
    # Options of this project's evaluation.
    *("BENCHMARKS=", "CONCURRENCY=", "DATASET=", "EVAL_DATA=", "FILE_CLIPS=", "GROUP_SIZE=", "LIMIT=", "MAX_TOKENS="),
    *("METHODS=", "MODEL=", "SEEDS=", "SERVER_ARGS=", "SERVER_URL="),
    # Read by SGLang and ModelScope, mostly when they are used.
    *READ,
    # Read by libraries when they are used, not when they are imported; SGLang sets them for its workers.
    *("NCCL_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "TRTLLM_", "PROMETHEUS_"),
    *("TORCHINDUCTOR_CACHE_DIR=", "TRITON_CACHE_DIR=", "CUDA_CACHE_PATH=", "TILELANG_CACHE_DIR="),
    "TORCH_EXTENSIONS_DIR=",
    # Read by CUTLASS and FlashInfer when imported, for what their compilers write: these do not run without a GPU.
    *("CUTE_DSL_LOG_", "FLASHINFER_WORKSPACE_BASE="),
    # Of pytest, the shell and the scripts.
    *("PYTEST_", "PYTHON=", "PYTHONPATH=", "PWD=", "OLDPWD=", "SHLVL=", "_="),
)
"""Beginnings of ``NAME=`` of the variables in which a launch may differ from its warm process. All others count."""
AGAIN = {"SGLANG_TEST_RETRACT": "TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL": "TEST_RETRACT_INTERVAL"}
"""Variables that SGLang's scheduler reads when it is imported, and where it keeps them: forks read them again."""
NOTHING = ("SGLANG_PLUGINS",)
"""Variables of which imports make nothing: of a platform's plugins there are none here, others are loaded later."""
LIBRARIES = {name.partition(".")[0] for name in preload.MODULES}
IMPORTS = LIBRARIES | {"sglang", "sgl_kernel"}
UNUSED = "SGLANG_ENABLE_TORCH_COMPILE"
"""A variable that SGLang reads while it is imported, for FlashInfer alone, and sets for its workers."""
OTHER_PROGRAM = "another program"
CUSTOMIZE = {"sitecustomize", "usercustomize"}
"""Modules that a starting interpreter imports by itself."""
BOOT = "import sys; sys.path[0] = {tests!r}; from support.warm.fork_server import main; del sys.path[0]; main({number})"
"""Program of a warm process."""
SMALL = "from multiprocessing.resource_tracker import"
"""Beginning of a program that uses nothing of what is warm."""


@dataclass(frozen=True)
class Warm:
    """A warm process, as far as it matters what may be forked from it.

    Attributes:
        environment: the variables that count, as it was started with.
        read: variables that count because its imports have read them.
        imported: variables that count and that imports have set in it.
        modules: top-level modules that it has imported.
        front: folders of its PYTHONPATH: those with other versions of what it has imported.
        path: its sys.path without these, and without what a launch puts in front.
        added_path: what imports have added to it.
        descriptors: files that its libraries have opened.
    """

    environment: dict[str, str]
    read: list[str]
    imported: dict[str, str]
    modules: list[str]
    front: list[str]
    path: list[str]
    added_path: list[str]
    descriptors: list[int]


def counted(environment: Mapping[str, str], read: Iterable[str] = ()) -> dict[str, str]:
    """The variables that count.

    Args:
        environment: all variables.
        read: names of variables that imports have read.
    """
    also = set(read)
    return {
        name: value
        for name, value in environment.items()
        if (name in also or not f"{name}=".startswith(FREE)) and name != UNUSED
    }


def difference(environment: Mapping[str, str], warm: Warm) -> list[str]:
    """Variables that count in which ``environment`` differs from ``warm``'s.

    One that an import has set in the warm process may be set already: the launching process imports the same.
    """
    own = counted(environment, warm.read)
    return [
        name
        for name in sorted(own.keys() | warm.environment.keys())
        if own.get(name) != warm.environment.get(name) and (name not in own or own[name] != warm.imported.get(name))
    ]


def replacing(environment: Mapping[str, str], cwd: str, modules: Iterable[str] = IMPORTS) -> list[str]:
    """Folders of PYTHONPATH with a version of one of these modules, in front of what is installed."""
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    folders = dict.fromkeys(os.path.join(cwd, entry) for entry in entries)
    return [folder for folder in folders if not _modules(folder).isdisjoint(modules)]


def misfits(launch: Launch, warm: Warm) -> str | None:
    """Why a launch cannot be forked from this warm process, but may be from another; None where it can."""
    if names := difference(launch.environment, warm):
        return f"environment: {', '.join(names)}"
    if (folders := replacing(launch.environment, launch.cwd, warm.modules)) != warm.front:
        return f"versions in {folders}"
    return None


def counting(looked_for: Iterable[str]) -> list[str]:
    """Of the variables that imports have looked for, those that count for whoever is forked afterwards."""
    return sorted(name for name in looked_for if name.startswith(READ) and name not in {*AGAIN, *NOTHING})


def front(program: Program, cwd: str) -> list[str]:
    """What the interpreter puts at the front of sys.path for a program, before PYTHONPATH."""
    if getattr(sys.flags, "safe_path", False):
        return []
    if program.kind == "script":
        return [os.path.dirname(os.path.realpath(os.path.join(cwd, program.what)))]
    return ["" if program.kind == "-c" else cwd]


def boots(launch: Launch) -> bool:
    """Whether what is started is a warm process."""
    return launch.program is not None and launch.program.what.startswith(BOOT.partition("{")[0])


def must_start_anew(launch: Launch) -> str | None:
    """Why a launch cannot be forked from any warm process of this interpreter; None where it can."""
    if launch.command[0] != sys.executable:
        return OTHER_PROGRAM
    if launch.program is None or launch.program.what.startswith(SMALL):
        return "not a program to be warm for"
    if launch.options not in ([], subprocess._args_from_interpreter_flags()):  # type: ignore[attr-defined]
        return f"options {launch.options}"
    if not os.path.isdir(launch.cwd):
        return "no working directory"
    return None


def shadowed(launch: Launch, warm: Warm) -> list[str]:
    """Modules of the warm process that folders in front of sys.path would replace, and modules that customize."""
    assert launch.program is not None
    folders = [*front(launch.program, launch.cwd), *launch.environment.get("PYTHONPATH", "").split(os.pathsep)]
    places = {os.path.join(launch.cwd, folder) for folder in folders}
    names = CUSTOMIZE.union(warm.modules)
    return sorted({name for folder in places.difference(warm.path, warm.front) for name in names & _modules(folder)})


def _modules(folder: str) -> set[str]:
    if not os.path.isdir(folder):
        return set()
    entries = [entry.split(".") for entry in os.listdir(folder)]
    files = {parts[0] for parts in entries if parts[-1] in {"py", "pyc", "so"}}
    packages = {parts[0] for parts in entries if os.path.isfile(os.path.join(folder, ".".join(parts), "__init__.py"))}
    return files | packages
