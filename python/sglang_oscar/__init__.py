"""INT2 KV cache for stock SGLang, installed as a plugin. See :mod:`sglang_oscar.touchpoints` for where it attaches."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.17"
"""The one SGLang release that the touch points were written for and tested with."""
