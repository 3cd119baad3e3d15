"""SGLang's request pool in int2 mode: it says when a request loses its row, and when all do."""

from __future__ import annotations

from typing import Any

from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.requests import lifecycle


class ObservedRows:
    """What stands before SGLang's own class in that of the request pool."""

    def free(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """The request loses its row."""
        lifecycle.before_free_row(self, req)
        return super().free(req, *args, **kwargs)  # type: ignore[misc]

    def clear(self, *args: Any, **kwargs: Any) -> Any:
        """All requests are gone."""
        lifecycle.before_clear_rows(self)
        return super().clear(*args, **kwargs)  # type: ignore[misc]


def observe(cache: Int2Cache) -> None:
    """Put :class:`ObservedRows` before the class of a cache's request pool, of which SGLang has several."""
    pool = cache.req_to_token_pool
    stock = type(pool)
    pool.__class__ = type(stock.__name__, (ObservedRows, stock), {})
