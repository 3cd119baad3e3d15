"""What the assembler says of the CUDA kernels, such as registers that it had to keep in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cuda.bindings import nvrtc

from oscar_kernels.cuda import jit

SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled_bytes(name: str, defines: Mapping[str, int], text: str | None = None) -> int:
    """Compile a source file as the product does, and count the bytes that its kernel spills. Needs no GPU.

    Args:
        name: file of the kernels' sources.
        defines: macros.
        text: in place of the file's; None for that.
    """
    found = SPILLED.findall(log := assembler_log(name, defines, text))
    assert found, f"the assembler says nothing of spills:\n{log}"
    return sum(int(count) for pair in found for count in pair)


def assembler_log(name: str, defines: Mapping[str, int], text: str | None = None) -> str:
    """What the assembler says of a source file."""
    source = (jit.SOURCES / name).read_bytes() if text is None else text.encode()
    options = [*jit.options(defines), "--ptxas-options=-v"]
    program: Any = jit.check(nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    jit.check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    log = b" " * jit.check(nvrtc.nvrtcGetProgramLogSize(program))
    jit.check(nvrtc.nvrtcGetProgramLog(program, log))
    jit.check(nvrtc.nvrtcDestroyProgram(program))
    return log.decode(errors="replace")
