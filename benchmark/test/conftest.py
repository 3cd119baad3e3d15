"""Tests of benchmark code are set up as all others."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import support.session  # noqa: F401
