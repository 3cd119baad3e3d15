"""Names and defaults that the parts of int2 mode share with SGLang's arguments."""

from __future__ import annotations

from typing import Any

from oscar_rotation.defaults import GROUP_SIZE as GROUP_SIZE_OF_FITS

DTYPE = "int2"
"""What --kv-cache-dtype says in int2 mode."""
GROUP_SIZE = "kv_cache_quant_group_size"
"""What the plugin adds to ``ServerArgs``."""
BACKEND = "oscar"
"""Attention backend of int2 mode, as ``ServerArgs.attention_backend`` says it."""
CHOSEN_ROTATIONS = "_oscar_rotations"
"""Mark in the ``__dict__`` of server arguments: ``keys``, ``values`` and ``origin`` of rotations, as the process that
launches the server chose them."""
WEIGHTS_SEEN = "_oscar_weights_seen"
"""Mark in the ``__dict__`` of server arguments: files of weights that were there at launch, with bytes and time of
change."""
DEFAULT_PAGE_SIZE = 64
"""Tokens of a page unless --page-size is given."""
DEFAULT_GROUP_SIZE = GROUP_SIZE_OF_FITS
"""Channels that share a scale unless --kv-cache-quant-group-size is given, or the largest power of two below that
divides head_dim."""


def is_int2(server_args: Any) -> bool:
    """Whether these server arguments ask for int2 mode."""
    return bool(server_args.kv_cache_dtype == DTYPE)
