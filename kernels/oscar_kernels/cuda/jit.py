"""Compile CUDA C++ with NVRTC, keep the result on disk, load it.

NVRTC comes with PyTorch's CUDA packages, so no toolkit has to be installed; the sources include no toolkit header.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "src"
ARCHITECTURE = "sm_90a"


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/sglang-oscar``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-oscar"


def check(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call; raises RuntimeError with the call's error name where it failed."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error.name if hasattr(error, 'name') else error}")
    return values[0] if len(values) == 1 else tuple(values) or None


def _fingerprint(name: str, options: list[str], compiler: tuple[int, int]) -> str:
    """Hash of everything that the result depends on: all sources, the options and the compiler."""
    digest = hashlib.sha256(repr((name, options, compiler)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def compile_source(name: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of one source file.

    Args:
        name: file in ``src``, for example ``decode.cu``.
        defines: macros.

    Returns:
        a cubin for :data:`ARCHITECTURE`, from the cache where it is there. Needs no GPU.

    Raises:
        CompileError: the source does not compile with these macros.
    """
    from cuda.bindings import nvrtc

    options = [f"-arch={ARCHITECTURE}", "-std=c++17", f"-I{SOURCES}", "-default-device"]
    options += [f"-D{key}={int(value)}" for key, value in sorted(defines.items())]
    compiler = check(nvrtc.nvrtcVersion())
    # The include path is no part of the result.
    stored = cache_dir() / f"{_fingerprint(name, [o for o in options if not o.startswith('-I')], compiler)}.cubin"
    if stored.is_file():
        return stored.read_bytes()
    source = (SOURCES / name).read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CompileError(f"{name}: {log.decode(errors='replace').strip()}")
    code = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, code))
    check(nvrtc.nvrtcDestroyProgram(program))
    _write(stored, code)
    return code


def _write(path: Path, data: bytes) -> None:
    """Write a cache file in one step, so that another process never reads half of it; a read-only cache is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        pass


@cache
def load(name: str, function: str, defines: tuple[tuple[str, int], ...], shared_bytes: int) -> Any:
    """A kernel ready to be launched, compiled and loaded once per process.

    Args:
        name: file in ``src``.
        function: name of the kernel in it.
        defines: macros, as sorted pairs.
        shared_bytes: dynamic shared memory of a block.

    Returns:
        a ``CUfunction``.
    """
    from cuda.bindings import driver

    code = compile_source(name, dict(defines))
    library = check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, function.encode()))
    device = check(driver.cuCtxGetDevice())
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, device))
    return driver.CUfunction(int(kernel))
