"""A finding, and how it comes about."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_oscar.errors import Int2Error


@dataclass(frozen=True)
class Check:
    """One finding. ``detail`` says what was found; ``change``, of a failed check, what to do about it."""

    name: str
    ok: bool
    detail: str
    change: str = ""

    def line(self) -> str:
        """The finding as one line."""
        return f"ok   {self.name}: {self.detail}" if self.ok else f"FAIL {self.name}: {self.detail} -> {self.change}"


def attempt(name: str, what: Callable[[], str]) -> Check:
    """Run a check that returns what it found, or raises an Int2Error ``reason; what to change``."""
    try:
        return Check(name, True, what())
    except Int2Error as error:
        text = str(error)
        reason, _, change = text.rpartition("; ") if "; " in text else text.rpartition(": ")
        return Check(name, False, reason or text, change or "see the message")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what SGLang says on import off the report."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
