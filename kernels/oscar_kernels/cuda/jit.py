"""Compile CUDA C++ with NVRTC, keep the result on disk, load it.

NVRTC comes with PyTorch's CUDA packages, so no toolkit has to be installed; the sources include no toolkit header.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from oscar_kernels import builds
from oscar_kernels.errors import KernelError

SOURCES = Path(__file__).parent / "src"
ARCHITECTURE = "sm_90a"


def cache_dir() -> Path | None:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/sglang-oscar``, by default under ``~/.cache``.

    None, and every process compiles for itself, where there is neither that variable nor a home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "sglang-oscar"
    try:
        return Path.home() / ".cache" / "sglang-oscar"
    except RuntimeError:
        return None


def check(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call.

    Raises:
        KernelError: the call failed; with the name of its error.
    """
    error, *values = result
    if int(error) != 0:
        raise KernelError(f"CUDA: {error.name if hasattr(error, 'name') else error}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _bindings(name: str) -> Any:
    """A module of cuda-python that can be called.

    Raises:
        KernelError: it is not installed, or the library that it calls is not.
    """
    try:
        module = importlib.import_module(f"cuda.bindings.{name}")
        if name == "nvrtc":
            module.nvrtcVersion()  # looks for the library
    except (ImportError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KernelError(
            f"cuda.bindings.{name} cannot be used ({why}); install cuda-python and nvidia-cuda-nvrtc"
        ) from error
    return module


def _first_error(log: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _fingerprint(name: str, options: list[str], compiler: tuple[int, int]) -> str:
    """Hash of everything that the result depends on: all sources, the options and the compiler."""
    digest = hashlib.sha256(repr((name, options, compiler)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def options(defines: Mapping[str, int]) -> list[str]:
    """What the compiler is told: architecture, language, where the sources lie, and macros.

    Args:
        defines: macros.
    """
    told = [f"-arch={ARCHITECTURE}", "-std=c++17", f"-I{SOURCES}", "-default-device"]
    return told + [f"-D{key}={int(value)}" for key, value in sorted(defines.items())]


def compile_source(name: str, defines: Mapping[str, int], text: str | None = None) -> bytes:
    """Machine code of one source file.

    Args:
        name: file in ``src``, for example ``decode.cu``.
        defines: macros.
        text: what is compiled in place of the file's; None for that.

    Returns:
        a cubin for :data:`ARCHITECTURE`, from the cache where it is there. Needs no GPU.

    Raises:
        KernelError: the source does not compile with these macros, or there is no compiler.
    """
    stored = _place(name, defines, text)
    kept = stored and _read(stored)
    if kept:
        return kept
    nvrtc, told = _bindings("nvrtc"), options(defines)
    source = (SOURCES / name).read_bytes() if text is None else text.encode()
    program = check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(told), [option.encode() for option in told])
    if int(status) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip("\0 \n")
        raise KernelError(f"{name} does not compile: {_first_error(said)}", said)
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    if stored:
        _write(stored, code)
    return code


def is_kept(name: str, defines: Mapping[str, int]) -> bool:
    """Whether :func:`compile_source` would find its result in the cache."""
    stored = _place(name, defines)
    return stored is not None and stored.exists()


def _place(name: str, defines: Mapping[str, int], text: str | None = None) -> Path | None:
    """Where the machine code of a source file, or of a text in its place, is kept; None where nothing is."""
    compiler = check(_bindings("nvrtc").nvrtcVersion())
    # The include path is no part of the result.
    of = name if text is None else f"{name}\0{text}"
    fingerprint = _fingerprint(of, [o for o in options(defines) if not o.startswith("-I")], compiler)
    folder = cache_dir()
    return folder and folder / f"{fingerprint}.cubin"


def _read(path: Path) -> bytes | None:
    """A cache file; None where there is none that this user can read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a cache file in one step, so that another process never reads half of it; a read-only cache is no error.

    Who may read it is up to the user's umask, so users can share a cache.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        pass


@cache
def load(
    name: str, function: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, text: str | None = None
) -> Any:
    """A kernel ready to be launched, compiled and loaded once per process.

    Args:
        name: file in ``src``.
        function: name of the kernel in it.
        defines: macros, as sorted pairs.
        shared_bytes: dynamic shared memory of a block.
        text: see :func:`compile_source`.

    Returns:
        a ``CUfunction``.

    Raises:
        KernelError: it does not compile, or the driver refuses it.
    """
    begin = time.monotonic()
    driver = _bindings("driver")
    code = compile_source(name, dict(defines), text)
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, function.encode()))
    device = check(driver.cuCtxGetDevice())
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device))
    builds.report(name, time.monotonic() - begin)
    return driver.CUfunction(int(kernel))
