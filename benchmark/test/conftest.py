"""Tests of benchmark code are set up as all others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import support.session  # noqa: F401, I001 (before torch is imported)
from tokenizers import processors
from transformers import AutoTokenizer

FRONT = "<|im_start|>"


@pytest.fixture
def begun_tokenizer() -> tuple[Any, int]:
    """The shipped model's tokenizer, but that it puts a token in front of every text, as Gemma's does; and that."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[2] / "models" / "reference")
    front = tokenizer.convert_tokens_to_ids(FRONT)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FRONT} $A", special_tokens=[(FRONT, front)]
    )
    return tokenizer, front
