"""Launch a loaded kernel on PyTorch's current stream."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from oscar_kernels.cuda.jit import check

POINTER = ctypes.c_void_p


def struct(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    """A kernel parameter passed by value, laid out as C++ lays it out."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@cache
def processors(device: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    function: Any,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    arguments: list[ctypes._SimpleCData[Any] | ctypes.Structure],
    overlap: bool = False,
) -> None:
    """Start a kernel.

    Args:
        function: from :func:`oscar_kernels.cuda.jit.load`.
        grid: blocks in x, y and z.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        arguments: the kernel's parameters as ctypes values.
        overlap: the kernel may start before its predecessor in the stream ends; it waits for it by itself.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))
