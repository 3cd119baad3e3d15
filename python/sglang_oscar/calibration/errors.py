"""Errors of the drivers; each message is one line that names the fault and the remedy."""

from __future__ import annotations


class DataError(ValueError):
    """A calibration or evaluation data set that is missing, gated or malformed."""


class HarnessError(RuntimeError):
    """The evaluation harness is missing or failed."""
