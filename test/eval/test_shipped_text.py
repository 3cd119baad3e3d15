"""Text that calibration ships: every kind, as many tokens as asked for, the same every time."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from oscar_tools.calibration.self_calibration import TOKENS
from oscar_tools.calibration.shipped_text import LENGTH, LONG, prompts
from support.reference import MODEL

SIGNS = {
    "prose": "The ferry had stopped running",
    "German": "Als der neue Fahrplan kam",
    "Russian": "Весной река поднялась",
    "Chinese": "村口有一棵老槐树",
    "code": "export class TaskQueue",
    "descriptions": "# tidewatch",
    "tools": '"type": "function"',
    "chat": "<|im_start|>user\nA train leaves at 9:40",
    "chat about the library": "<|im_start|>user\nWhat does the",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_every_kind_and_all_tokens(tokenizer: Any) -> None:
    found = prompts(tokenizer, TOKENS, LONG)
    assert 0.9 * TOKENS < sum(map(len, found)) <= TOKENS
    texts = [tokenizer.decode(ids) for ids in found]
    for kind, sign in SIGNS.items():
        assert any(sign in text for text in texts), kind
    assert sum(len(ids) > 2 * LENGTH for ids in found) == 2
    assert len(set(texts)) == len(texts)
    assert found == prompts(tokenizer, TOKENS, LONG)


def test_the_end_has_several_kinds(tokenizer: Any) -> None:
    """A fit chooses on the last quarter, by tokens behind the windows of 16 bits."""
    found = prompts(tokenizer, TOKENS, LONG)
    assert len({tokenizer.decode(ids[:8]) for ids in found[-6:]}) == 6
    assert all(len(ids) > 500 for ids in found[-6:])


def test_no_prompt_is_longer_than_the_model_takes(tokenizer: Any) -> None:
    assert max(map(len, prompts(tokenizer, 4000, 300))) == 300


def test_a_template_that_takes_no_conversation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model gets conversations as plain text."""
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('none of these') }}")
    texts = [tokenizer.decode(ids) for ids in prompts(tokenizer, TOKENS, LONG)]
    assert any("User: A train leaves at 9:40" in text for text in texts)
