"""Text of a real model's tables: four kinds, three parts without a document in common, the same at every run."""

from __future__ import annotations

import gzip
import json
import sys
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.corpus import KINDS, PARTS, TEXTS, Corpus, part_of, plain_chat, python_sources, texts_of  # noqa: E402
from accuracy.material import SEQUENCES, RealMaterial  # noqa: E402
from reference_model.corpus import held_out_tokens  # noqa: E402
from reference_model.retrieval import HELD_OUT  # noqa: E402

LINES_THAT_REPEAT = 0.2
"""Licences, imports and empty lines are in many files."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models" / "reference")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_share_no_document(kind: str) -> None:
    """Every part has text, no text is in two, and asking again gives the same."""
    texts = {part: list(TEXTS[kind](part, plain_chat)) for part in PARTS}
    for part, found in texts.items():
        assert sum(map(len, found)) > 40_000, part
        assert found == list(TEXTS[kind](part, plain_chat))
    for one, other in combinations(PARTS, 2):
        assert not set(texts[one]) & set(texts[other])
        lines = [{x for text in texts[part] for x in text.splitlines() if len(x) > 60} for part in (one, other)]
        assert len(lines[0] & lines[1]) < LINES_THAT_REPEAT * min(map(len, lines))


def test_held_out_modules_are_reported_on() -> None:
    """What the shipped models have not seen comes first in the report and is in no other part."""
    held_out = [name for name in python_sources() if name in HELD_OUT]
    assert list(python_sources())[: len(held_out)] == held_out
    assert {part_of(name) for name in HELD_OUT} == {"report"}


def test_report_text_is_that_of_the_shipped_models(tokenizer) -> None:
    tokens = Corpus(tokenizer).tokens("source", "report", 50_000)
    assert np.array_equal(tokens, held_out_tokens(tokenizer.backend_tokenizer, 50_000))


def test_lines_of_further_text(tmp_path: Path) -> None:
    """Text, messages or a question, compressed or not; any other line is refused."""
    chat = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "said"}]
    rows = [{"text": "alone"}, {"messages": chat}, {"question": "asked", "answer": "said"}]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.jsonl").write_text(lines + '\n{"prompt": "x"}\n')
    wanted = ["alone", plain_chat(chat), plain_chat(chat)]
    assert list(texts_of(tmp_path / "a.jsonl.gz", plain_chat)) == wanted
    found = texts_of(tmp_path / "b.jsonl", plain_chat)
    assert list(islice(found, 3)) == wanted
    with pytest.raises(SystemExit, match=r"b\.jsonl:4: a line needs text, messages, or question and answer"):
        next(found)


def test_material_of_a_real_model(begun_tokenizer, tmp_path: Path) -> None:
    """Contexts of every kind, calibration of every domain in one shape, questions from lines of the measured part; all
    begin as the tokenizer begins a text."""
    tokenizer, front = begun_tokenizer
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"text": "alone " * 900}))
    material = RealMaterial(tokenizer, "choice", [more])
    shapes = {material.calibration(domain).shape for domain in material.domains if domain not in SEQUENCES}
    ((_, length),) = shapes
    for domain, of_each in SEQUENCES.items():
        found = material.calibration(domain)
        assert found.shape == (6 * of_each, length)
        assert (found[:, 0] == front).all()
        assert [tokenizer.decode(row).count("alone") > 300 for row in found] == of_each * ([False] * 5 + [True])
    for kind in material.kinds:
        text = material.text(kind, 3, 400)
        assert text.shape == (3, 400)
        assert (text[:, 0] == front).all()
    asked = material.questions(800, 1, 2)
    assert (asked.prompts[:, 0] == front).all()
    lines = set(material.corpus.lines("choose"))
    text = tokenizer.decode(asked.prompts[0])
    inside = [line in lines for line in text.splitlines(keepends=True)[1:-1] if "magic number" not in line]
    assert np.mean(inside) > 0.9
    with pytest.raises(ValueError, match="no text of kind 'poems'"):
        material.corpus.tokens("poems", "train")
