"""The CUDA kernels on a CPU: compiled by the host compiler with another ``ptx.cuh``, launched through the same Python.

It runs what a GPU would, thread by thread, so indices, layouts, barriers and the merge between blocks are those of the
real kernel; speed, memory order and the latency of copies are not.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

from oscar_kernels.cuda import decode, pair, prefix, prompt, store
from oscar_kernels.cuda.jit import SOURCES

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
FOLDER = Path(gettempdir()) / "oscar-cuda-emulator"
BLOCKS = 3
"""Multiprocessors that the emulated GPU has."""
STACK = 256 << 10
"""Bytes of the stack of one emulated thread."""
OPTIONS = ["-std=c++17", "-Og", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
"""More optimization takes longer than what it saves: most kernels run once."""
DECODE = ("Query", "Buffers", "Tables", "Partials", "Result", "Reading", "Books")
PARAMETERS = {
    "decode.cu": ("oscar_decode", DECODE),
    "verify.cu": ("oscar_verify", DECODE),
    "decode_pair.cu": (
        "oscar_decode_pair",
        (*(f"{part}::{of}" for part in ("first", "second") for of in DECODE), "int"),
    ),
    "store.cu": (
        "oscar_store",
        ("Side", "Side", "Queries", "Slots", "int", "int", "int", "int", "int", "int", "Points"),
    ),
    "prompt.cu": ("oscar_prompt", ("Side", "Side", "Queries", "Slots", "int", "int", "int")),
    "prefix.cu": ("oscar_prefix", ("Side", "Side", "Spans", "Tables", "int", "int")),
}


_taken = [mmap.mmap(-1, STACK)]


def _stacks(threads: int) -> ctypes.c_void_p:
    """Stacks that every kernel shares: a process that maps more than the machine's memory cannot fork."""
    if len(_taken[0]) < threads * STACK:
        _taken[0] = mmap.mmap(-1, threads * STACK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(_taken[0])))


def _compile(options: list[str], source: Path, to: Path) -> None:
    """Compile a file; nobody sees a result before it is whole."""
    part = to.with_name(f".{secrets.token_hex(4)}{to.suffix}")
    assert COMPILER is not None
    subprocess.run([COMPILER, *OPTIONS, *options, "-o", str(part), str(source)], check=True)
    part.replace(to)


@cache
def _headers() -> Path:
    """The standard library's headers, compiled once: they take a third of the time of a kernel."""
    text = "\n".join(re.findall(r"^#include <.*>$", (HERE / "ptx.cuh").read_text(), re.MULTILINE)) + "\n"
    folder = FOLDER / hashlib.sha256(repr((text, OPTIONS)).encode()).hexdigest()[:24]
    header = folder / "standard.h"
    if not (compiled := folder / "standard.h.gch").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        _compile(["-x", "c++-header"], header, compiled)
    return header


@cache
def build(
    name: str, function: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, text: str | None = None
) -> Callable[..., None]:
    """A kernel compiled for the host: takes blocks, threads and the addresses of its parameters.

    Raises:
        subprocess.CalledProcessError: it does not compile; the compiler has said why.
    """
    expected, types = PARAMETERS[name]
    assert function == expected
    sources = {path.name: path.read_text() for path in sorted(SOURCES.iterdir())}
    sources |= {name: (HERE / name).read_text() for name in ("ptx.cuh", "warpgroup.cuh")}
    for source in PARAMETERS:
        own = sources[source] if text is None or source != name else text
        own = re.sub(r"extern __shared__ [^;]*char shared\[\];", "char* shared = emulated_shared();", own)
        own = re.sub(r"__shared__ float (\w+)\[[^;]*\];", r"float* \1 = (float*)emulated_shared();", own)
        # Beside what is dynamic.
        own = re.sub(r"__shared__ int (\w+);", rf"int& \1 = *(int*)(emulated_shared() + {shared_bytes});", own)
        assert "__shared__" not in own
        sources[source] = own
    arguments = ", ".join(f"*({of}*)arguments[{index}]" for index, of in enumerate(types))
    sources["main.cpp"] = f"""
#include "{name}"
extern "C" __attribute__((visibility("default"))) void run(int blocks, int threads, char* stacks, void** arguments) {{
  auto kernel = [&] {{ {function}({arguments}); }};
  emulator::launch(blocks, threads, {shared_bytes + 4}, stacks, {STACK}, kernel);
}}
"""
    macros = [f"-D{key}={value}" for key, value in defines]
    folder = FOLDER / hashlib.sha256(repr((sources, macros, OPTIONS)).encode()).hexdigest()[:24]
    library = folder / "kernel.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for source, own in sources.items():
            (folder / source).write_text(own)
        _compile(["-shared", "-include", str(_headers()), *macros], folder / "main.cpp", library)
    loaded = ctypes.CDLL(str(library))

    def run(blocks: int, threads: int, arguments: list[Any]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        loaded.run(blocks, threads, _stacks(blocks * threads), addresses)

    return run


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: list[Any],
    overlap: bool = False,
) -> None:
    """As :func:`oscar_kernels.cuda.launch.launch`."""
    kernel(grid[0], threads, arguments)


@contextmanager
def emulated(blocks: int = BLOCKS) -> Iterator[None]:
    """The launches of :mod:`oscar_kernels.cuda` take tensors on the CPU in here."""
    changed = {"load": build, "launch": launch, "processors": lambda device: blocks}
    with ExitStack() as stack:
        for module in (decode, pair, store, prompt):
            stack.enter_context(patch.multiple(module, **changed))
        stack.enter_context(patch.multiple(prefix, load=build, launch=launch))
        for loaded in (store._load, prompt._load, prefix.prepare):
            loaded.cache_clear()
            stack.callback(loaded.cache_clear)
        yield
