"""Messages that docs/troubleshooting.md explains are still said."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
OF_OTHERS = (
    "invalid choice",
    "Unsupported kv_cache_dtype",
    "KV cache dtype mismatch",
    "Not enough host memory",
    "SGLANG_..=",
)
"""Beginnings of messages of SGLang and pydantic."""
VARYING = re.compile(r"\.\.\.?|\b[A-Z]\b|-?\b\d[\d,]*\b|'[^']*'|\w+=|=\w+")
"""What stands for something else in a message: dots, a capital, a number, a quoted value, a value that is set."""


def messages() -> list[str]:
    """Code in the first column of tables, names of flags and files left out."""
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row) if " " in text]


def said() -> str:
    """All sources, with texts that go over several lines in one piece."""
    folders = ("python", "kernels", "rotation")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))


def test_messages_are_said() -> None:
    found, sources = messages(), said()
    assert len(found) > 30
    parts = {text: max(VARYING.split(text), key=len).strip(" :,()") for text in found if not text.startswith(OF_OTHERS)}
    assert [text for text, part in parts.items() if part not in sources] == []
