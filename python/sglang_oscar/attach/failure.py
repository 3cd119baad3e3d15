"""Why int2 mode cannot work in this process: remembered when the plugin loads, told only where int2 is asked for.

A server that does not ask for int2 must not notice that the plugin is installed, whatever is wrong with it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from packaging.version import Version

from sglang_oscar import SGLANG_VERSIONS

ALLOW_NEWER = "SGLANG_OSCAR_ALLOW_NEWER"
"""Variable that lets a release serve that is newer than those that were tested, where its touch points read back."""

_error: str | None = None
_expected: tuple[str, ...] = ()
_absent: Callable[[], list[str]] = list
_strange: Callable[[], list[str]] = list


def read_back_by(strange: Callable[[], list[str]]) -> None:
    """Say what finds touch points that a newer release does not have as they are known."""
    global _strange
    _strange = strange


def remember(error: BaseException) -> None:
    """Keep what went wrong while flags or hooks were installed."""
    global _error
    _error = f"{type(error).__name__}: {error}"


def remember_taken_name() -> str:
    """Keep, and return, that SGLang itself has a cache dtype of our name."""
    global _error
    _error = (
        "--kv-cache-dtype int2 is SGLang's own here, not this plugin's; to use it set SGLANG_PLUGINS=none (or to your "
        f"other plugins), for this plugin's install {supported()} as released"
    )
    return _error


def expect(targets: Iterable[str], absent: Callable[[], list[str]] = list) -> None:
    """Say what :func:`reason` must find.

    Args:
        targets: functions of SGLang that are to be hooked in this process.
        absent: finds those that are not there for a worker to hook. Asked only when a reason is: it imports them.
    """
    global _expected, _absent
    _expected, _absent = tuple(targets), absent


def unsupported_release() -> str | None:
    """Why the installed SGLang cannot be served with int2, or None."""
    installed = importlib.metadata.version("sglang")
    if base_release(installed) in SGLANG_VERSIONS or (newer_release() and newer_allowed(os.environ)):
        return None
    return f"sglang {installed} is installed, int2 mode needs {supported()}"


def newer_release() -> str | None:
    """The version of the installed SGLang, or a candidate's, where it is newer than all that were tested; else None."""
    installed = importlib.metadata.version("sglang")
    later = base_release(installed) not in SGLANG_VERSIONS and Version(installed) > Version(SGLANG_VERSIONS[-1])
    return installed if later else None


def newer_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the environment lets a newer release serve.

    >>> newer_allowed({"SGLANG_OSCAR_ALLOW_NEWER": "1"}), newer_allowed({"SGLANG_OSCAR_ALLOW_NEWER": "0"})
    (True, False)
    """
    return environment.get(ALLOW_NEWER, "").lower() in ("1", "true", "t", "yes", "y", "on")


def base_release(version: str) -> str:
    """The release that a version is served as: one of its post-releases or local builds is; no candidate for it.

    >>> base_release("0.5.20.post2"), base_release("0.5.20+cu129"), base_release("0.5.21rc1")
    ('0.5.20', '0.5.20', '0.5.21rc1')
    """
    parsed = Version(version)
    return parsed.public if parsed.is_prerelease else parsed.base_version


def supported() -> str:
    """The supported releases, as a requirement that pip understands."""
    return f"sglang>={SGLANG_VERSIONS[0]},<={SGLANG_VERSIONS[-1]}"


def reason() -> str | None:
    """Why int2 mode cannot work in this process, or None.

    SGLang logs and drops hooks that it cannot attach, so what was attached is read back from its registry.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if _error is not None:
        return _error
    if (unsupported := unsupported_release()) is not None:
        return f"{unsupported}; {_read_back()}" if newer_release() else unsupported
    missing = [target for target in _expected if target not in HookRegistry._patched] or _absent()
    return f"not attached: {', '.join(missing)}" if missing else None


def _read_back() -> str:
    """What a newer release has of the touch points, told by importing it."""
    try:
        strange = _strange()
    except Exception as error:
        return f"its touch points cannot be read ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if strange:
        return f"touch points that do not read back: {', '.join(strange)}"
    return f"all touch points read back: {ALLOW_NEWER}=1 serves it, untested"


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for int2 mode; for when its flags could not be added to SGLang's parser.

    >>> asked_for(["--kv-cache-dtype", "int2"]), asked_for(["--kv-cache-dtype=int2"]), asked_for(["--dtype", "auto"])
    (True, True, False)
    """
    flag = "--kv-cache-dtype"
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any((one, two) == (flag, "int2") or one == f"{flag}=int2" for one, two in pairs)


def dump_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the environment asks for a dump, which nothing would write where nothing is hooked.

    >>> dump_asked_for({"DUMP_KVCACHE": "1"}), dump_asked_for({"DUMP_KVCACHE": "0"}), dump_asked_for({})
    (True, False, False)
    """
    return environment.get("DUMP_KVCACHE", "").lower() not in ("", "0", "false", "f", "no", "n", "off")
