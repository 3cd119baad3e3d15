"""What differs between the supported releases of SGLang in the host tier and storage, as in
:mod:`sglang_oscar.attach.releases`.

Host pools used to take the device's pool; newer releases describe its buffers to them.
"""

from __future__ import annotations

import inspect
from typing import Any

from sglang_oscar.attach import releases


def keeps_drafts_on_the_host() -> bool:
    """Whether a draft model's cache may have a host pool of its own, with as many tokens as that of the model."""
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    return "host_token_capacity" in inspect.signature(HostKVCache).parameters


def stores_namespaces() -> bool:
    """Whether SGLang's keys of storage tell name spaces apart; those of older releases are made of tokens alone."""
    return releases.exists("sglang.srt.mem_cache.utils.storage_namespace_seed")


def device_rows(source: Any) -> tuple[list[Any], list[Any]]:
    """Key and value tensors by layer of what a host pool is made from.

    Args:
        source: SGLang's KV pool, or its MHABufferInfo.
    """
    if hasattr(source, "k_buffer"):
        return list(source.k_buffer), list(source.v_buffer)
    return list(source.buffers.k), list(source.buffers.v)


def device_dtype(source: Any) -> Any:
    """The dtype that rows have in what a host pool is made from."""
    return source.store_dtype if hasattr(source, "store_dtype") else source.dtype


def host_pool_geometry(signature: Any, source: Any, token_bytes: int, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments by which HostKVCache is told of the device's pool.

    Args:
        signature: of HostKVCache.
        source: SGLang's KV pool, or its MHABufferInfo.
        token_bytes: bytes of a token on the host.
        given: what SGLang passed to the host pool's class.
    """
    if "device_pool" in signature.parameters:
        return {"device_pool": source}
    of = given if "start_layer" in given else {name: getattr(source, name) for name in ("start_layer", "end_layer")}
    capacity = given.get("device_capacity_tokens")
    if capacity is None:
        capacity = getattr(source, "host_capacity_tokens", None) or source.size
    tokens = given.get("host_token_capacity")
    return ({} if tokens is None else {"host_token_capacity": tokens}) | {
        "dtype": device_dtype(source),
        "device_capacity_tokens": capacity,
        "size_per_token": token_bytes,
        "start_layer": of["start_layer"],
        "end_layer": of["end_layer"],
    }
