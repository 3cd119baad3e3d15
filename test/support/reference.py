"""The shipped reference model: its folder, its tokenizer, its retrieval tasks, and rotations fitted to it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import FITTED, PUBLISHED, FitRequest
from support.activations import write_dump

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from reference_model.retrieval import DIGITS, Document, build_document, chat_question, question  # noqa: E402

__all__ = ["DIGITS", "MODEL", "Document", "chat_question", "document", "fit_rotations", "question", "token_ids"]

MODEL = ROOT / "models" / "reference"
CALIBRATION_SEED = 500


@cache
def tokenizer() -> Tokenizer:
    """The model's tokenizer."""
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def token_ids(text: str) -> list[int]:
    """Tokens of a text."""
    return tokenizer().encode(text).ids


def document(length: int, seed: int, facts: int = 4) -> Document:
    """A document of about ``length`` tokens with facts in its quantized part."""
    return build_document(lambda text: len(token_ids(text)), length, facts, seed)


def fit_rotations(
    folder: Path, documents: int = 6, recipe: str = PUBLISHED, options: FitOptions | None = None
) -> dict[str, str]:
    """Fit rotations to the model's activations on documents; returns the variables that name the files."""
    texts = [document(1800, CALIBRATION_SEED + number) for number in range(documents)]
    prompts = [token_ids(text.text + question(next(iter(text.facts)))) for text in texts]
    dump = write_dump(MODEL, prompts, folder / "dump")
    chosen = FITTED[recipe]
    files = chosen.run(FitRequest(dump, options or FitOptions(), str(MODEL))).save(folder, chosen.suffixes[:1])
    return {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(path) for side, path in zip("KV", files, strict=True)}
