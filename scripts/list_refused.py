"""Write docs/refused.md: what int2 mode refuses and what to change, from the tables that it refuses by.

python scripts/list_refused.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from sglang_oscar.attach import known_arguments, refusals
from sglang_oscar.attach.refusals import Check
from sglang_oscar.features.disaggregation import arguments as disaggregation
from sglang_oscar.features.hybrids import refusals as hybrids
from sglang_oscar.features.sliding_windows import models as windows
from sglang_oscar.features.speculation import arguments as speculation
from sglang_oscar.features.tiers import arguments as tiers

PAGE = Path(__file__).parents[1] / "docs" / "refused.md"
BF16 = "use `--kv-cache-dtype auto`"
INTRODUCTION = """# What int2 mode refuses

A server that is started with one of these ends with one line that names it, before its model is loaded, and with exit
status 78; what only the layers of a model say, while it is loaded. This page is written by `python
scripts/list_refused.py` from the tables that the server itself asks. Settings and files that are refused are in
[troubleshooting.md](troubleshooting.md).
"""

UNTRIED = (
    "Nobody has served int2 with these arguments of SGLang off their defaults. They are not refused; a server that is "
    "started with some names them in one line (`int2 mode: untried arguments: ...`). What was tried, and what cannot "
    "matter, is listed in `python/sglang_oscar/attach/known_arguments.py`."
)


def rows(table: Iterable[tuple[Check, str]]) -> list[tuple[str, str]]:
    """What is refused and what to do, of a table of checks whose lines part the two with a semicolon."""
    parted = [what.rpartition("; ")[::2] for _, what in table]
    return [(what, code(change)) if what else (change, BF16) for what, change in parted]


def code(text: str) -> str:
    """Flags, with the names they are set to, and variables as code."""
    taken = re.sub(r"(--[a-z0-9-]+(?: (?!or|and|to\b)[a-z0-9_]+(?=$|;|,))?)", r"`\1`", text)
    return re.sub(r"\b(SGLANG_[A-Z_]+)", r"`\1`", taken)


def section(title: str, head: tuple[str, str], lines: Iterable[tuple[str, str]]) -> str:
    """A heading and a table of two columns."""
    cells = [head, *lines]
    printed = [f"| {left} | {right} |\n" for left, right in cells]
    return f"\n## {title}\n\n" + "".join([printed[0], "|---|---|\n", *printed[1:]])


def page() -> str:
    """The text of the page."""
    window_models = [
        *((f"`{name}`", "SGLang keeps all layers in one pool") for name in windows.ONE_POOL),
        *((f"`{name}`", why) for name, why in windows.REASONS.items()),
        ("others", windows.UNTRIED),
    ]
    parts = {
        "Speculative decoding": speculation.REFUSED,
        "Host memory and storage": tiers.REFUSED,
        "Prefill and decode on servers of their own": disaggregation.REFUSED,
    }
    named = {id(row) for part in parts.values() for row in part}
    parts["Other features of a server"] = [row for row in refusals.ARGUMENTS if id(row) not in named]
    parts["Models"] = [*refusals.MODELS, *refusals.ATTENTION]
    parts["Served models with sliding windows (" + ", ".join(sorted(windows.SERVED)) + ")"] = windows.REFUSED
    parts["Hybrid models"] = hybrids.ARGUMENTS
    parts["Models that see images"] = refusals.VISION
    sections = [section(title, ("refused", "instead"), rows(table)) for title, table in parts.items()]
    sections.append(section("Other models with sliding windows", ("name begins with", "why not"), window_models))
    return INTRODUCTION + "".join(sections) + untried()


def untried() -> str:
    """The section of what is neither refused nor known to work."""
    flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in sorted(known_arguments.NOT_TRIED))
    texts = ["\n".join(textwrap.wrap(text, 120, break_on_hyphens=False)) for text in (UNTRIED, f"{flags}.")]
    return "\n## Not tried\n\n" + "\n\n".join(texts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
