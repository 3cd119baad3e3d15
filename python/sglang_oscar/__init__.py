"""INT2 KV cache for stock SGLang, installed as a plugin.

Read :mod:`sglang_oscar.attach` for how it enters SGLang, :mod:`sglang_oscar.memory` for who owns which bytes,
:mod:`sglang_oscar.requests` for the life of a request and :mod:`sglang_oscar.attention` for what a forward pass does.
"""

__version__ = "0.2.0"
"""Of the package, which is built with it; docs/releases.md says what a number promises."""
SGLANG_VERSIONS = tuple(f"0.5.{patch}" for patch in range(17, 24))
"""The SGLang releases that the touch points were written for and tested with, oldest first."""
