"""What a running server has room for, as it says itself."""

from __future__ import annotations

from typing import NamedTuple

import requests

from oscar_tools.local_server import LocalServer


class Room(NamedTuple):
    """Tokens that a cache holds, requests that run at once, tokens of a page, and GPUs of the server."""

    tokens: int
    requests: int
    page: int = 1
    gpus: int = 1

    def needed(self, requests: int, length: int) -> int:
        """Tokens that so many requests of ``length`` tokens, prompt and answer, take in whole pages."""
        return requests * -(-length // self.page) * self.page

    def fitting(self, length: int) -> int:
        """Requests of ``length`` tokens, prompt and answer, that run at once."""
        return min(self.requests, self.tokens // self.needed(1, length))

    def holds(self, requests: int, length: int) -> bool:
        """Whether so many of them run at once."""
        return requests <= self.fitting(length)


def room_of(server: LocalServer) -> Room:
    """The room of a server.

    Raises:
        requests.HTTPError: it does not say.
    """
    reply = requests.get(f"{server.url}/server_info", timeout=600)
    reply.raise_for_status()
    facts = reply.json()
    # Ranks of data-parallel attention are those of the tensor-parallel group.
    copies = 1 if facts.get("enable_dp_attention") else facts["dp_size"]
    return Room(
        facts["max_total_num_tokens"],
        facts["internal_states"][0]["effective_max_running_requests_per_dp"],
        facts["page_size"],
        facts["tp_size"] * facts["pp_size"] * copies,
    )
