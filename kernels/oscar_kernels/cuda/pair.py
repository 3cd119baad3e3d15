"""Decode of a layer that is cut by kv head: one launch for two parts, ``src/decode_pair.cu``, or a launch for each."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

import torch

from oscar_kernels.cache import BatchTables
from oscar_kernels.cuda import jit
from oscar_kernels.cuda.decode import call_of, run
from oscar_kernels.cuda.jit import load
from oscar_kernels.cuda.launch import launch, processors
from oscar_kernels.cuda.variant import SHARED_LIMIT, Variant
from oscar_kernels.parts import Part
from oscar_kernels.prepared import Output

SOURCE = "decode_pair.cu"
STATIC_BYTES = 128
"""Shared memory that the launch for two parts has beside what a part's block has."""


def attend(
    parts: tuple[Part, Part],
    tables: BatchTables,
    visible: torch.Tensor | None,
    sm_scale: float,
    workspaces: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """:func:`oscar_kernels.cuda.decode.decode` of a layer in two parts; with ``visible`` its ``verify``.

    Args:
        parts: in the order of their heads.
        tables, visible, sm_scale: as there.
        workspaces: one for each part; counters of the second lie where no other launch writes.

    Returns:
        [tokens, q_heads, head_dim], the heads of the first part before those of the second.

    Raises:
        ValueError, KernelError: as there.
    """
    q, heads = parts[0].q_rot, [part.q_rot.shape[1] for part in parts]
    out = q.new_empty(len(q), sum(heads), q.shape[2])
    # Each writes its heads of one output: joining two would be a launch more, up to 5 us.
    first, second = (
        call_of(part.cache, tables, visible, part.q_rot, sm_scale, workspace, Output(own, part.lse, part.reading))
        for part, own, workspace in zip(parts, out.split(heads, 1), workspaces, strict=True)
    )
    if not len(q):
        return out
    blocks = processors(q.device.index or 0)
    split = first_blocks(first.variant, second.variant, blocks)
    if split is None:
        run(first)
        run(second)
        return out
    kernel, shared = _load(first.variant, second.variant)
    arguments = [*first.arguments, *second.arguments, ctypes.c_int32(split)]
    launch(kernel, (blocks, 1, 1), first.variant.threads, shared, arguments, overlap=True)
    return out


def first_blocks(first: Variant, second: Variant, blocks: int) -> int | None:
    """Blocks of one launch that work on the first of two parts, the others on the second; None where each part takes a
    launch of its own.

    Blocks of a launch have one size. Parts whose warps differ in number, such as those of 3 and 5 kv heads, do not; and
    ``decode_pair.cu`` is of ``decode.cu``.

    Args:
        first, second: the parts.
        blocks: of a launch: one a multiprocessor, as those of a part wait for each other.
    """
    if first.warpgroups or second.warpgroups:
        return None
    if first.warps != second.warps or max(first.shared_bytes, second.shared_bytes) + STATIC_BYTES > SHARED_LIMIT:
        return None
    # Between the shares of bytes and of heads: a block's time is partly that of its copies, partly that of its warps.
    rows = [one.key.row_bytes + one.value.row_bytes for one in (first, second)]
    of_heads, of_bytes = first.kv_heads / (first.kv_heads + second.kv_heads), rows[0] / sum(rows)
    own = round(blocks * (of_heads + of_bytes) / 2)
    # Every matrix that outputs are multiplied by has blocks of its own (multiply.cuh).
    return own if own >= first.reading_sets and blocks - own >= second.reading_sets else None


def prepare(first: Variant, second: Variant, device: torch.device) -> None:
    """Compile (or find in the cache) and load the kernel for two parts, where one launch decodes them.

    Raises:
        KernelError: the kernel cannot be built or loaded on this machine.
    """
    if first_blocks(first, second, processors(device.index or 0)) is not None:
        _load(first, second)


def _load(first: Variant, second: Variant) -> tuple[Any, int]:
    """The kernel, and the dynamic shared memory of a block."""
    shared = max(first.shared_bytes, second.shared_bytes)
    return load(SOURCE, "oscar_decode_pair", (), shared, source(first, second)), shared


@cache
def source(first: Variant, second: Variant) -> str:
    """``decode_pair.cu`` with ``decode.cu`` of both variants, each in a namespace, in place of its includes."""
    text = (jit.SOURCES / SOURCE).read_text()
    for number, (name, variant) in enumerate((("first", first), ("second", second))):
        macros = [*variant.defines(), ("OSCAR_PART", number + 1)]
        lines = [f"#define {macro} {value}" for macro, value in macros]
        lines += [f"namespace {name} {{", _flat("decode.cu", {"ptx.cuh"}), "}"]
        lines += [f"#undef {macro}" for macro in dict(macros) | {"OSCAR_RUN_STAGES": 0}]
        text = text.replace(f'#include "{name}"', "\n".join(lines))
    return text


def _flat(name: str, seen: set[str]) -> str:
    """A source with what it includes, each file once; those of ``seen``, which grows, are left out."""
    seen.add(name)
    lines = []
    for line in (jit.SOURCES / name).read_text().splitlines():
        found = re.fullmatch(r'#include "(.*)"', line)
        if found is None and line != "#pragma once":
            lines.append(line)
        elif found is not None and found[1] not in seen:
            lines.append(_flat(found[1], seen))
    return "\n".join(lines)
