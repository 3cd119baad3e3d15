"""Experimental builds of the decode kernel for layers cut by kv head, made from the text of ``src``."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from oscar_kernels.cuda import jit
from oscar_kernels.cuda.variant import Variant

FOLDER = Path(os.environ.get("CUT_CACHE", Path(gettempdir()) / "cut-cubins"))
KERNEL = 'extern "C" __global__ void __launch_bounds__(THREADS, 1) oscar_decode('
PARAMETERS = ("Query", "Buffers", "Tables", "Partials", "Result", "Reading", "Books")
BLOCKS = """
DEVICE int& first_blocks() {
  __shared__ int blocks;
  return blocks;
}
"""
STATIC_BYTES = 128
"""Of shared memory, for the number of blocks of the first part."""


def flat(name: str = "decode.cu", seen: set[str] | None = None) -> str:
    """A source with what it includes, but for ``ptx.cuh``."""
    seen = set() if seen is None else seen
    lines = []
    for line in (jit.SOURCES / name).read_text().splitlines():
        found = re.fullmatch(r'#include "(.*)"', line)
        if line == "#pragma once" or (found and found[1] in {*seen, "ptx.cuh"}):
            continue
        if found:
            seen.add(found[1])
            lines.append(flat(found[1], seen))
        else:
            lines.append(line)
    return "\n".join(lines)


def _replace(text: str, old: str, new: str, count: int) -> str:
    assert text.count(old) == count, (old, text.count(old))
    return text.replace(old, new)


def _defined(variant: Variant) -> tuple[str, str]:
    define = "\n".join(f"#define {name} {value}" for name, value in variant.defines())
    undefine = "\n".join(f"#undef {name}" for name, _ in (*variant.defines(), ("OSCAR_RUN_STAGES", 0)))
    return define, undefine


def follower(variant: Variant) -> str:
    """A launch that its predecessor lets start once that has waited for its own: only its end waits."""
    text = flat()
    both = "wait_for_predecessor();\n      let_successor_start();"
    assert text.count(both) == 2  # before the first queries, and before the copying warp ends
    text = text.replace(both, "let_successor_start();", 1)
    text = _replace(text, "    wait_for_predecessor();  // a block without work", "    // a block without work", 1)
    text = _replace(text, "    wait_for_predecessor();  // write-after-read", "    // write-after-read", 1)
    assert text.count("wait_for_predecessor();") == 1
    return f'#include "ptx.cuh"\n{_defined(variant)[0]}\n{text}'


def cut(first: Variant, second: Variant) -> str:
    """One launch: the first blocks work on one part, the others on the other."""
    assert first.threads == second.threads
    text = _replace(flat(), KERNEL, "DEVICE void run(", 1)
    text = text.replace("blockIdx.x", "own_block()").replace("(int)gridDim.x", "own_blocks()")
    text = text.replace("gridDim.x", "own_blocks()")
    places = (("blockIdx.x", "first_blocks()"), ("blockIdx.x - first_blocks()", "gridDim.x - first_blocks()"))
    made = ['#include "ptx.cuh"', BLOCKS]
    for name, variant, (block, blocks) in zip("ab", (first, second), places, strict=True):
        define, undefine = _defined(variant)
        made += [define, f"namespace part_{name} {{"]
        made += [f"DEVICE int own_block() {{ return (int)({block}); }}"]
        made += [f"DEVICE int own_blocks() {{ return (int)({blocks}); }}", text, "}", undefine]
    parameters = ", ".join(f"part_{part}::{of} {part}{i}" for part in "ab" for i, of in enumerate(PARAMETERS))
    given = {part: ", ".join(f"{part}{i}" for i in range(len(PARAMETERS))) for part in "ab"}
    made.append(f"""
extern "C" __global__ void __launch_bounds__(part_a::THREADS, 1) oscar_decode({parameters}, int split) {{
  static_assert(part_a::THREADS == part_b::THREADS, "one block size");
  if (threadIdx.x == 0) first_blocks() = split;
  __syncthreads();
  if ((int)blockIdx.x < split) part_a::run({given["a"]});
  else part_b::run({given["b"]});
}}
""")
    return "\n".join(made)


def compiled(text: str, log: bool = False) -> tuple[bytes, str]:
    """Machine code and, where it was asked for, what the assembler says."""
    nvrtc = jit._bindings("nvrtc")
    said = ""
    stored = FOLDER / f"{hashlib.sha256(text.encode() + (jit.SOURCES / 'ptx.cuh').read_bytes()).hexdigest()[:32]}.cubin"
    if stored.is_file() and not log:
        return stored.read_bytes(), said
    options = [*jit.options({}), *(["--ptxas-options=-v"] if log else [])]
    program: Any = jit.check(nvrtc.nvrtcCreateProgram(text.encode(), b"cut.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if log or int(status) != 0:
        said = b" " * jit.check(nvrtc.nvrtcGetProgramLogSize(program))
        jit.check(nvrtc.nvrtcGetProgramLog(program, said))
        said = said.decode(errors="replace")
    if int(status) != 0:
        raise RuntimeError(said[:4000])
    code = b" " * jit.check(nvrtc.nvrtcGetCUBINSize(program))
    jit.check(nvrtc.nvrtcGetCUBIN(program, code))
    jit.check(nvrtc.nvrtcDestroyProgram(program))
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = stored.with_name(f".{secrets.token_hex(6)}")
    part.write_bytes(code)
    part.replace(stored)
    return code, said


@cache
def loaded(text: str, shared_bytes: int) -> Any:
    """A kernel ready to be launched."""
    driver = jit._bindings("driver")
    code, _ = compiled(text)
    library = jit.check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    kernel = jit.check(driver.cuLibraryGetKernel(library, b"oscar_decode"))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    jit.check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel, jit.check(driver.cuCtxGetDevice())))
    return driver.CUfunction(int(kernel))
