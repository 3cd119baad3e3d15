"""Hooks into SGLang's hierarchical cache: the class of the host pool, and what stands before storage."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar import names
from sglang_oscar.attach import refusals, releases
from sglang_oscar.features.tiers import host_releases
from sglang_oscar.features.tiers.arguments import WithStorage, check_nameable, check_storage
from sglang_oscar.worker import active


def around_get_mha_host_pool_cls(original: Callable[[Any], Any], source: Any, /) -> Any:
    """The host pool's class for rows, those of draft models too: bytes are bytes.

    Args:
        original: SGLang's.
        source: SGLang's KV pool or, in newer releases, what describes its buffers.
    """
    if active() is None:
        return original(source)
    from sglang_oscar.features.tiers.host_pool import Int2HostPool

    return Int2HostPool


def around_can_pack(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Whether a draft model's cache lies in pages of the model's own rows: it has a host pool of its own, as SGLang
    gives it to other draft models. Releases that do not ask have another function here, which is called as it is.
    """
    may = original(*args, **kwargs)
    return False if may and active() is not None else may


def around_create_backend(
    original: Callable[..., Any],
    cls: Any,
    /,
    backend_name: str,
    storage_config: Any,
    mem_pool_host: Any,
    **kwargs: Any,
) -> Any:
    """Put salts and checks before a storage backend, also one that is attached while the server runs.

    Raises:
        Int2Error: the backend, or how it is configured, is not served, files of weights have changed since they were
            loaded, or the folder is another user's.
    """
    if active() is None:
        return original(cls, backend_name, storage_config, mem_pool_host, **kwargs)
    from sglang.srt.runtime_context import get_server_args

    from sglang_oscar.features.tiers.folders import check_folder, folders_of
    from sglang_oscar.features.tiers.host_pool import Int2HostPool
    from sglang_oscar.features.tiers.salt import columns_of_this_process, salt_of_this_process
    from sglang_oscar.features.tiers.storage import CheckedStorage

    anchor = getattr(mem_pool_host, "anchor_entry", None)
    pool = mem_pool_host if anchor is None else anchor.host_pool
    assert isinstance(pool, Int2HostPool), f"the host tier of int2 mode is a {type(pool).__name__}"
    # As if the server had been started with it.
    args = WithStorage(releases.resolved(get_server_args()), backend_name)
    refusals.check_model(releases.model_config(get_server_args()), args)
    check_nameable(args)
    check_storage(backend_name, pool.layout, bool(storage_config.tp_lcm_size))
    # Of a server's, names of pages would say which path a model was served from, though salts say what it is.
    named_alike = copy.copy(storage_config)
    named_alike.model_name = names.DTYPE
    backend = original(cls, backend_name, named_alike, mem_pool_host, **kwargs)
    for folder in folders_of(backend):
        check_folder(folder)
    # SGLang tells clients the name of the class.
    named = type(type(backend).__name__, (CheckedStorage,), {})
    return named(backend, pool, salt_of_this_process(pool.page_layout), columns_of_this_process(pool.page_layout))


def around_get_hash_str(
    original: Callable[..., Any], token_ids: Any, prior_hash: str | None = None, page_size: int | None = None
) -> Any:
    """Keys of storage that begin with the name space of a prefix, where a release leaves it out: a request of one would
    find pages of another.

    Args:
        original: SGLang's.
        token_ids: of pages, which may know their extra key and salt.
        prior_hash: key of the page before them, None for the first.
        page_size: tokens of a page.
    """
    if not prior_hash and not host_releases.stores_namespaces():
        space = [getattr(token_ids, name, None) for name in ("extra_key", "cache_salt")]
        if any(part is not None for part in space):
            prior_hash = hashlib.sha256(json.dumps(space).encode()).hexdigest()
    return original(token_ids, prior_hash, page_size)


def around_page_get(
    original: Callable[..., Any],
    self: Any,
    operation: Any,
    hash_values: list[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> Any:
    """Read files of pages into host memory by a process of their own, as SGLang does with storage that reads there.

    The stock way makes room for every page and copies it from there, in one thread of the scheduler.
    """
    if _moves_files(self.storage_backend):
        return self._page_get_zero_copy(operation, hash_values, host_indices, extra_info)
    return original(self, operation, hash_values, host_indices, extra_info)


def around_page_set(
    original: Callable[..., Any],
    self: Any,
    hash_values: list[str],
    host_indices: torch.Tensor,
    extra_info: Any = None,
) -> Any:
    """Write files of pages by a process of their own."""
    if _moves_files(self.storage_backend):
        return self._page_set_zero_copy(hash_values, host_indices, extra_info)
    return original(self, hash_values, host_indices, extra_info)


def _moves_files(storage: Any) -> bool:
    """Whether storage is ours and of files."""
    from sglang_oscar.features.tiers.storage import CheckedStorage

    return isinstance(storage, CheckedStorage) and storage.is_files
