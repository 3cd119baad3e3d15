"""What int2 mode does not serve of hierarchical caching, by server arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.attach.arguments import drafts_with_model
from sglang_oscar.attach.feature import Refusal
from sglang_oscar.attach.releases import argument
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.tiers.folders import VARIABLE, belongs_to_another, folder_of_files
from sglang_oscar.features.tiers.host_releases import keeps_drafts_on_the_host

LAYOUTS = ("page_first", "page_first_direct", "layer_first")
IO_BACKENDS = ("kernel", "direct")
FILE = "file"
STORAGE = (FILE, "nixl", "mooncake", "hf3fs")
"""Storage backends that take pages as they are: by tensors, or two equal objects a page."""
DROP = "drop --enable-hierarchical-cache"


def has_host_tier(args: Any) -> bool:
    """Whether a server keeps rows in host memory, too."""
    return bool(args.enable_hierarchical_cache)


def _when(refused: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda args: has_host_tier(args) and bool(refused(args))


def _when_stored(refused: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return _when(lambda args: args.hicache_storage_backend is not None and refused(args))


UNKNOWN_STORAGE = (
    "storage that wants to know more of a page than its bytes; set --hicache-storage-backend " + " or ".join(STORAGE)
)
IN_PIECES = f"storage of pages that are not one piece of host memory; set --hicache-mem-layout {LAYOUTS[0]}"
BY_HEADS = (
    "ranks of another number reading slices of rows, which are not heads; drop tp_lcm_size from "
    "--hicache-storage-backend-extra-config"
)

UNNAMED: list[Refusal] = [
    (
        lambda a: bool(a.enable_lora or a.lora_paths),
        "storage beside LoRA adapters; drop --hicache-storage-backend or --enable-lora and --lora-paths",
    ),
    (
        lambda a: a.remote_instance_weight_loader_start_seed_via_transfer_engine,
        "storage beside weights that others may write; drop --hicache-storage-backend or "
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    (
        lambda a: drafts_with_model(a) and a.hicache_storage_backend != FILE,
        "storage other than files beside a draft model; set --hicache-storage-backend file",
    ),
]
"""Arguments of servers whose weights keys of storage cannot name, or not with any storage, whenever it is attached."""


class WithStorage:
    """Server arguments as they would be had a server been started with the storage that is attached to it.

    Args:
        args: resolved arguments.
        backend: SGLang's name of the storage.
    """

    def __init__(self, args: Any, backend: str) -> None:
        self._args = args
        self.hicache_storage_backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def check_nameable(args: Any) -> None:
    """Refuse storage that is attached to a server whose weights keys cannot name.

    Raises:
        Int2Error: naming what to change.
    """
    for refused, what in UNNAMED:
        if refused(args):
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what}")


def check_storage(backend: str, layout: str, cuts_heads: bool) -> None:
    """Refuse storage that is not served, when it is attached.

    Args:
        backend: SGLang's name of it.
        layout: of host memory.
        cuts_heads: whether it is configured for ranks of several numbers.

    Raises:
        Int2Error: naming what to change.
    """
    unfit = [
        (backend not in STORAGE, UNKNOWN_STORAGE),
        (backend != FILE and layout == "layer_first", IN_PIECES),
        (cuts_heads, BY_HEADS),
    ]
    for refused, what in unfit:
        if refused:
            raise Int2Error(f"--kv-cache-dtype int2 does not support {what}")


REFUSED: list[Refusal] = [
    (
        _when(lambda a: a.hicache_mem_layout not in LAYOUTS),
        "host memory in which rows are cut by heads (page_head, page_first_kv_split): equal slices of a row are not "
        f"heads; set --hicache-mem-layout {LAYOUTS[0]}",
    ),
    (
        _when(lambda a: a.hicache_io_backend not in IO_BACKENDS),
        "copies of pages by another engine; set --hicache-io-backend " + " or ".join(IO_BACKENDS),
    ),
    (
        _when(lambda a: argument(a, "hicache_host_memory_mode", "cache") != "cache"),
        "host memory that only buffers; drop --hicache-host-memory-mode",
    ),
    (_when(lambda a: a.hicache_storage_backend not in (None, *STORAGE)), UNKNOWN_STORAGE),
    (
        _when(lambda a: a.hicache_storage_backend not in (None, FILE) and a.hicache_mem_layout == "layer_first"),
        IN_PIECES,
    ),
    (
        _when(lambda a: a.hicache_storage_backend == FILE and belongs_to_another(folder_of_files())),
        f"pages from a folder that belongs to another user, who could put any there; set {VARIABLE} to a folder of "
        "your own",
    ),
    *((_when_stored(refused), what) for refused, what in UNNAMED),
    (_when(lambda a: "tp_lcm_size" in (a.hicache_storage_backend_extra_config or "")), BY_HEADS),
    (
        _when(
            lambda a: a.speculative_algorithm is not None and not (drafts_with_model(a) and keeps_drafts_on_the_host())
        ),
        "hierarchical caching beside drafts, but for draft models from SGLang 0.5.23; "
        f"{DROP} or --speculative-algorithm",
    ),
]
"""What is refused, in the order in which it is asked; see :mod:`sglang_oscar.attach.refusals`."""
