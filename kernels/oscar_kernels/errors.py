"""What the kernels raise that an operator, not a programmer, has to mend."""

from __future__ import annotations


class KernelError(RuntimeError):
    """A kernel cannot be built or loaded on this machine. The message is a single line that says why.

    Args:
        message: that line.
        log: everything that the compiler said; empty where it was not asked.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
