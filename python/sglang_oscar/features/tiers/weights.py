"""Which weights a server has, noted where they are loaded and updated: keys of storage name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_oscar.formats import origin
from sglang_oscar.memory.build import Built
from sglang_oscar.settings import Settings


def note_before_loading(server_args: Any, settings: Settings, model: Any, note: None) -> Settings:
    """Files that are here when a server is launched."""
    origin.note_before_loading(server_args)
    return settings


def note_loaded(built: Built) -> None:
    """Files that a worker has read."""
    from sglang.srt.runtime_context import get_server_args

    origin.note_loaded(get_server_args())


@contextmanager
def around_observe_weight_load(original: Callable[..., Any], self: Any, source: str) -> Iterator[None]:
    """Weights change, from wherever they come: what is stored meanwhile and later is not of the old ones."""
    origin.note_changed()
    try:
        with original(self, source):
            yield
    finally:
        origin.note_changed()
