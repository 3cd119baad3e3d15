"""How int2 mode says no: one line that names the fault and what to change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn

from pydantic import ValidationError

EXIT_CODE = 78
"""Exit status of a process that int2 mode stopped (EX_CONFIG of sysexits.h)."""


class Int2Error(ValueError):
    """Int2 mode cannot run as configured. The message is a single line meant for the operator."""


class ImpossibleRequestError(RuntimeError):
    """A request is in a state that nothing should have let it come to. It is ended; others go on."""


def malformed(error: ValidationError, env: Mapping[str, str]) -> Int2Error:
    """The first fault of settings whose aliases are the environment variables that they were read from."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    return Int2Error(f"{name}={env.get(name, '')!r}: {first['msg'].lower()}")


def fatal(error: BaseException | str) -> NoReturn:
    """End this process with one line on stderr.

    SGLang swallows ordinary exceptions of plugins and turns those of its workers into long tracebacks;
    SystemExit passes through both.

    Raises:
        SystemExit: always, with status 78.
    """
    print(f"sglang-oscar: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_CODE)
