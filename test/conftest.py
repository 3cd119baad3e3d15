"""Makes ``support`` importable for all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Read when torch is imported; without it two busy processes slow each other down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
