"""The command ``oscar``: the rotation tools and ``oscar doctor``."""

from __future__ import annotations

from oscar_rotation.cli import app

__all__ = ["app"]
