"""What a server says of its INT2 cache: in ``/server_info``, and as labels of a metric."""

from __future__ import annotations

from typing import Any

import sglang_oscar
from oscar_kernels.format import code_widths, mean_bits
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.worker import chosen_rotations

KEY = "oscar"
"""Name of the facts in SGLang's internal state: ``/server_info`` shows it as ``internal_states[replica]["oscar"]``."""
CONTEXT_OF_BITS = 128 * 1024
"""Bits per element are stated for a request of this many tokens (paper, table 2)."""
FACTS = {
    "version": "version of the plugin",
    "recipe": "recipe of the rotations",
    "rotations": "`keys` and `values`, paths or built-in recipes, and `origin`: where both come from",
    "fingerprint": "SHA-256 of rotations and row format; servers with the same one can read each other's rows",
    "codes": "bits of codes, in words",
    "bits": "stored bits per element, without windows",
    "bits_at_128k": "the same of a request of 128K tokens, with windows",
    "group_sizes": "channels that share a scale",
    "sink": "sink window, tokens",
    "recent": "recent window, tokens",
    "recomputed": "newest tokens of a prompt that no prefix hit covers",
}
"""What is said, by name."""


def facts(cache: Int2Cache) -> dict[str, Any]:
    """What the rows of a cache mean, as JSON values.

    Returns:
        A value for each of :data:`FACTS`.
    """
    geometry = cache.plan.geometry
    return {
        "version": sglang_oscar.__version__,
        "recipe": cache.recipe,
        "rotations": chosen_rotations(),
        "fingerprint": cache.fingerprint,
        "codes": code_widths(geometry.formats.values()),
        "bits": mean_bits(geometry.formats.values()),
        "bits_at_128k": geometry.bits_per_element(CONTEXT_OF_BITS),
        "group_sizes": geometry.group_sizes,
        "sink": geometry.windows.sink,
        "recent": geometry.windows.recent,
        "recomputed": geometry.windows.recent if cache.settings.recompute_recent and cache.kept is None else 0,
    }


def after_get_internal_state(reply: Any, self: Any, recv_req: Any) -> None:
    """Add the facts to what a scheduler answers.

    Args:
        reply: SGLang's GetInternalStateReqOutput.
        self: the scheduler.
        recv_req: what was asked.
    """
    cache = cache_of(self.req_to_token_pool)
    if cache is not None:
        reply.internal_state[KEY] = facts(cache)
