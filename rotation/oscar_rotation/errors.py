"""The exceptions of this package. Each message is one line that names the file, the fault and the remedy."""

from __future__ import annotations


class RotationFileError(ValueError):
    """A rotation file, or recipe name, that cannot be used."""


class DumpError(ValueError):
    """A dump of activations that is missing, broken or does not suffice."""


class ReportError(ValueError):
    """A fit report that is missing or broken, or cannot be drawn here."""
