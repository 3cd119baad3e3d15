"""The table of docs/entering_sglang.md counts the hooks that there are."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_oscar.attach import touchpoints
from sglang_oscar.attach.feature import features
from sglang_oscar.features import register_all

PAGE = Path(__file__).resolve().parents[2] / "docs" / "entering_sglang.md"


def test_every_room_and_its_hooks_are_counted() -> None:
    register_all()
    hooks = {"attach": len(touchpoints.GATE)}
    hooks |= {feature.name: len([*feature.in_arguments, *feature.in_schedulers]) for feature in features()}
    hooks = {name: count for name, count in hooks.items() if count and name != "cpu"}
    page = PAGE.read_text()
    counted = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)}
    assert counted == hooks
    assert f"counts this table: {sum(hooks.values())} in all" in page
