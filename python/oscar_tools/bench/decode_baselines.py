"""Decode attention that the quantized cache is compared with: stock kernels over caches of BF16 and FP8."""

from __future__ import annotations

import importlib.util
import math
from functools import partial

import torch

from oscar_tools.bench import fa3_baseline, xqa_baseline
from oscar_tools.bench.synthetic import PAGE, Heads, random_pages, shuffled_tables
from oscar_tools.bench.timing import Calls, device, layers_of

DTYPES = {"": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""Caches by what follows the underscore in a name."""
NAMES = ("flashinfer", "flashinfer_fp8", "fa3", "fa3_fp8", "xqa", "xqa_fp8", "torch")
MODULES = {"fa3": fa3_baseline, "xqa": xqa_baseline}
"""Where baselines are that have a module of their own, by what stands before the underscore."""


def flashinfer_calls(heads: Heads, batch: int, length: int, dtype: torch.dtype) -> Calls:
    """Layers of FlashInfer's paged decode: BF16 queries, a cache of ``dtype``."""
    import flashinfer

    tables, slots = shuffled_tables([length] * batch, PAGE)
    shape = (slots // PAGE, 2, PAGE, heads.kv, heads.head_dim)
    layers = layers_of(dtype.itemsize * math.prod(shape))
    pools = [random_pages(shape, dtype) for _ in range(layers)]
    q = torch.randn(batch, heads.query, heads.head_dim, device=device()).bfloat16()
    pages = -(-length // PAGE)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device()) * pages
    last = torch.full((batch,), (length - 1) % PAGE + 1, dtype=torch.int32, device=device())
    buffer = torch.empty(512 << 20, dtype=torch.uint8, device=device())
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=True)
    wrapper.plan(
        indptr,
        tables.page_table.flatten(),
        last,
        *heads,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=dtype,
    )
    return [partial(wrapper.run, q, pool) for pool in pools]


def sdpa_calls(heads: Heads, batch: int, length: int) -> Calls:
    """One layer of PyTorch's BF16 attention over contiguous keys and values."""
    shape = (batch, heads.kv, length, heads.head_dim)
    k, v = (torch.randn(shape, device=device(), dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads.query, 1, heads.head_dim, device=device(), dtype=torch.bfloat16)
    return [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)]


def calls_of(name: str, heads: Heads, batch: int, length: int) -> Calls:
    """Layers of the baseline of that name."""
    package, _, cache = name.partition("_")
    if package == "torch":
        return sdpa_calls(heads, batch, length)
    make = MODULES[package].decode_calls if package in MODULES else flashinfer_calls
    return make(heads, batch, length, DTYPES[cache])


def installed(name: str) -> bool:
    """Whether what a baseline takes is here, for this GPU."""
    package = name.partition("_")[0]
    if name == "fa3_fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return False  # it is compiled for Hopper only
    return MODULES[package].available() if package in MODULES else importlib.util.find_spec(package) is not None


def default() -> list[str]:
    """FlashInfer's caches, or PyTorch's attention where FlashInfer is missing."""
    return ["flashinfer", "flashinfer_fp8"] if installed("flashinfer") else ["torch"]


def chosen(text: str) -> list[str]:
    """Baselines by their names, separated by commas.

    Raises:
        ValueError: a name is unknown, or what it stands for is not installed.
    """
    names = text.split(",")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no baseline {name!r}: there are {', '.join(NAMES)}")
        if not installed(name):
            package = name.partition("_")[0]
            missing = MODULES[package].NEEDED if package in MODULES else package
            raise ValueError(f"baseline {name}: {missing} is not installed")
    return names
