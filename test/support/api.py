"""What tests ask a server besides completions."""

from __future__ import annotations

import time
from typing import Any

import requests

from support.servers import Server


def loads(server: Server) -> tuple[int, int]:
    """Requests on the server and tokens that they and the prefix cache hold."""
    core = requests.get(f"{server.url}/v1/loads", params={"include": "core"}, timeout=600).json()["loads"][0]
    return core["num_running_reqs"] + core["num_waiting_reqs"], core["num_used_tokens"]


def wait_for(condition, what: str) -> None:
    """Wait until ``condition()``; a limit far beyond any sensible duration only ends a hanging test."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"never happened: {what}")


def retracted(server: Server) -> int:
    """Requests that were retracted so far."""
    lines = [line for line in server.text().splitlines() if "#retracted_reqs: " in line]
    return sum(int(line.partition("#retracted_reqs: ")[2].partition(",")[0]) for line in lines)


def from_host(answers: list[dict[str, Any]]) -> list[int]:
    """Tokens of each request that came from host memory."""
    return from_tier(answers, "host")


def from_storage(answers: list[dict[str, Any]]) -> list[int]:
    """Tokens of each request that came from storage."""
    return from_tier(answers, "storage")


def from_tier(answers: list[dict[str, Any]], tier: str) -> list[int]:
    """Tokens of each request that came from a tier of SGLang's prefix cache."""
    details = [answer["meta_info"]["cached_tokens_details"] for answer in answers]
    return [of[tier] if of else 0 for of in details]
