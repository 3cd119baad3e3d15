"""The exceptions of this package. Each message is one line that names the file, the fault and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def first_line(error: Exception) -> str:
    """What an exception says first, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class RotationFileError(ValueError):
    """A rotation file, or recipe name, that cannot be used."""


class DumpError(ValueError):
    """A dump of activations that is missing, broken or does not suffice."""


class DumpVersionError(DumpError):
    """A dump in a layout of another release."""


@contextmanager
def of_layer(layer: int) -> Iterator[None]:
    """While inside, what is wrong with numbers is told with the layer whose dump has them.

    Raises:
        DumpError: in place of a ValueError.
    """
    try:
        yield
    except DumpError:
        raise
    except ValueError as error:
        raise DumpError(f"layer {layer} of the dump: {error}") from error


class ReportError(ValueError):
    """A fit report that is missing or broken, or cannot be drawn here."""
