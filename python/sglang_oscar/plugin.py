"""Entry point ``sglang.srt.plugins``: runs in every SGLang process before arguments are parsed.

Imports nothing heavy at module level, because SGLang logs and swallows an ImportError here. What must not fail
silently is split in two: the flags, without which ``--kv-cache-dtype int2`` cannot even be asked for, end the
process; a touch point that cannot be attached is remembered and reported by the gate if int2 mode is requested,
so that a server that does not use int2 is never disturbed.
"""

from __future__ import annotations

import importlib.metadata

_failure: str | None = None


def register() -> None:
    """Install flags and touch points. Called by SGLang's plugin loader."""
    from sglang_oscar import SGLANG_VERSION
    from sglang_oscar.errors import fatal

    global _failure
    try:
        from sglang_oscar.attach import flags

        flags.install()
    except Exception as error:
        installed = importlib.metadata.version("sglang")
        fatal(f"cannot add int2 to sglang {installed} (this plugin is for sglang=={SGLANG_VERSION}): {error}")
    try:
        from sglang_oscar.attach import touchpoints

        touchpoints.register_all()
    except Exception as error:
        _failure = f"{type(error).__name__}: {error}"


def failure() -> str | None:
    """Why int2 mode cannot work in this process, or None.

    SGLang logs and drops hooks that it cannot attach, so what was attached is read back from its registry.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_oscar import SGLANG_VERSION

    installed = importlib.metadata.version("sglang")
    if installed.split("+")[0] != SGLANG_VERSION:
        return f"sglang {installed} is installed, int2 mode needs sglang=={SGLANG_VERSION}"
    if _failure is not None:
        return _failure
    from sglang_oscar.attach import touchpoints

    missing = [target for target in touchpoints.targets() if target not in HookRegistry._patched]
    return f"not attached: {', '.join(missing)}" if missing else None
