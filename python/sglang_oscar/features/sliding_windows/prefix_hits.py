"""Prefix hits of models with sliding windows.

A hit needs the window in front of where it ends. In int2 mode it ends up to ``recent`` tokens before the end of what is
cached, because the last ``recent`` tokens of a prompt are computed again; SGLang keeps the window in front of that end
only. So a request keeps more of its windows while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.memory.cache import cache_of


def around_free_out_of_window(original: Callable[..., None], req: Any, pre_len: int, **kwargs: Any) -> None:
    """Free windows of a running request, but for those that the next turn's hit needs."""
    cache = cache_of(kwargs["req_to_token_pool"])
    windows = None if cache is None else cache.plan.part(WindowPool)
    if windows is not None:
        kwargs["sliding_window_size"] = max(kwargs["sliding_window_size"], windows.kept)
    original(req, pre_len, **kwargs)
