"""Entry point ``sglang.srt.plugins``: runs in every SGLang process before arguments are parsed.

Nothing that goes wrong here may reach a server that does not ask for int2. What goes wrong is remembered
(:mod:`sglang_oscar.attach.failure`) and told by the gate where int2 mode is asked for; where the flag itself could not
be added to SGLang's parser, which would then only say "invalid choice", it is told here, and so it is to who asks for a
dump.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def register() -> None:
    """Install flags and hooks. Called by SGLang's plugin loader."""
    from sglang_oscar.attach import failure, flags
    from sglang_oscar.errors import fatal
    from sglang_oscar.features import register_all

    failure.read_back_by(_strange)
    try:
        # On another release nothing is touched: a hook may fit by name and mean something else.
        if failure.unsupported_release() is None:
            from sglang_oscar.attach import processes

            if processes.detokenizes():
                return
            from sglang_oscar.attach import bindings, touchpoints

            register_all()
            flags.install()
            processes.begin()
            points, later = touchpoints.of_arguments(), touchpoints.of_scheduler(processes.may_serve_int2())
            if processes.schedules():
                points, later = points + later, []
            targets = touchpoints.register_all(points)
            bindings.install(targets)
            failure.expect(targets, lambda: _not_there(points, later))
            return
        if flags.name_is_taken():
            failure.remember_taken_name()
    except flags.NameTakenError:
        failure.remember_taken_name()
        touchpoints.register_all(touchpoints.TAKEN_NAME)
    except Exception as error:
        failure.remember(error)
    if failure.asked_for(sys.argv) or failure.dump_asked_for(os.environ):
        fatal(f"int2 mode cannot attach to SGLang: {failure.reason()}")


def _strange() -> list[str]:
    """Touch points of int2 servers that the installed release does not have as they are known."""
    from sglang_oscar.attach import newer
    from sglang_oscar.features import register_all

    register_all()
    return newer.strange()


def _not_there(points: list[Any], later: list[Any]) -> list[str]:
    """Touch points that cannot be hooked, of those that are and those that a worker is to hook ``later``. In a release
    that nobody has tested they must have their parameters, too."""
    from sglang_oscar.attach import failure, newer, touchpoints

    return touchpoints.absent(later) if failure.newer_release() is None else newer.strange(points + later)


def hook_models(server_args: Any) -> None:
    """Hook what a scheduler of these server arguments has hooked, in a process that runs a model without one; after
    :func:`register`.

    Args:
        server_args: SGLang's ServerArgs, resolved.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_oscar.attach import bindings, failure, touchpoints
    from sglang_oscar.names import is_int2

    points = touchpoints.of_scheduler(is_int2(server_args))
    points = [point for point in points if point.target() not in HookRegistry._patched]
    targets = touchpoints.register_all(points)
    bindings.install(targets)
    HookRegistry.apply_hooks()
    failure.expect(targets)
