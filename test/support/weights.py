"""Sending weights to a server as trainers do."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import requests
import torch
from sglang.srt.utils import MultiprocessingSerializer

from sglang_oscar.attach.releases import exists
from support.servers import Server

SESSIONS = exists("sglang.srt.managers.io_struct.BeginWeightUpdateReqOutput")
"""Whether updates from memory run within a session."""


def post(server: Server, route: str, **body: Any) -> dict[str, Any]:
    """What a route answers that says whether it worked; it must have."""
    reply = requests.post(f"{server.url}/{route}", json=body, timeout=600)
    assert reply.json()["success"] is True, reply.text
    return reply.json()


def send(server: Server, *buckets: Sequence[tuple[str, torch.Tensor]], flush: bool, **said: Any) -> None:
    """Send buckets of named tensors in host memory, within one session where there are sessions.

    Args:
        server: an int2 or stock server.
        buckets: one behind the other.
        flush: whether the last of them flushes the cache.
        said: what else the last one says.
    """
    if SESSIONS:
        post(server, "begin_weight_update")
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        for number, bucket in enumerate(buckets, 1):
            last = {"flush_cache": flush, **said} if number == len(buckets) else {"flush_cache": False}
            sent = base64.b64encode(MultiprocessingSerializer.serialize(list(bucket))).decode()
            post(server, "update_weights_from_tensor", serialized_named_tensors=[sent], **last)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    if SESSIONS:
        post(server, "end_weight_update")
