"""Conversations as data: messages with roles and text."""

from __future__ import annotations

from typing import Any


def is_chat(messages: list[Any]) -> bool:
    """Whether this is a conversation that can be rendered: some messages, each with a role and text."""
    return bool(messages) and all(
        isinstance(x, dict) and isinstance(x.get("role"), str) and isinstance(x.get("content"), str) for x in messages
    )
