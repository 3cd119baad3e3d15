"""Settings of int2 mode in a worker: those of its environment, with what the process that launched it has decided."""

from __future__ import annotations

import functools

from sglang_oscar.names import CHOSEN_ROTATIONS, is_int2
from sglang_oscar.settings import Settings


@functools.cache
def of_this_process() -> Settings:
    """Settings of a worker, read once from its environment, and rotations as the process that launched it chose them.

    Raises:
        Int2Error: as :meth:`Settings.from_env`.
    """
    settings, chosen = Settings.from_env(), chosen_rotations()
    return settings.with_rotations(**chosen) if chosen else settings


def chosen_rotations() -> dict[str, str]:
    """``keys``, ``values`` and ``origin`` of the rotations that this worker was told of; empty where it was not."""
    from sglang.srt.runtime_context import get_server_args

    try:
        server_args = get_server_args()
    except ValueError:  # there are none yet
        return {}
    return dict(getattr(server_args, "__dict__", {}).get(CHOSEN_ROTATIONS, {}))


def active() -> Settings | None:
    """Settings of int2 mode in a worker; None where its server does not ask for int2."""
    from sglang.srt.runtime_context import get_server_args

    return of_this_process() if is_int2(get_server_args()) else None
