"""The command ``oscar``: the rotation tools and ``oscar doctor``."""

from __future__ import annotations

from oscar_rotation.cli import app
from sglang_oscar.doctor import doctor

__all__ = ["app"]

app.command("doctor")(doctor)
