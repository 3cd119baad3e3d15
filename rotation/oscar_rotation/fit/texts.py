"""Text that a fit measures with, as JSON Lines, and sequences of tokens made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.chats import is_chat
from oscar_rotation.errors import DumpError, first_line
from oscar_rotation.math.attention_weights import RECENT, SINK

SEQUENCES, LENGTH, TAIL = 12, 1536, 128
"""Sequences that are measured, their tokens where the model's context has so many, and the last ones of each, whose
distributions are compared."""

MOST_TOKENS = 1_000_000
"""Of a text, the first ones; sequences are spread evenly over them."""

Document = str | list[dict[str, str]]
"""A text, or the messages of a chat."""


def read_documents(path: Path) -> tuple[Document, ...]:
    """Lines of a .jsonl file that have ``text`` or ``messages``.

    Raises:
        DumpError: a line that is no such thing, or none at all.
        OSError: the file cannot be read.
    """
    found: list[Document] = []
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                document: Any = (row.get("messages") or row.get("text")) if isinstance(row, dict) else None
                if not _is_document(document):
                    raise DumpError(f"{path}:{number}: a line needs 'text' or 'messages'")
                found.append(document)
        except DumpError:
            raise
        except ValueError as error:
            raise DumpError(f"{path}: is no JSON Lines of text ({error})") from error
    if not found:
        raise DumpError(f"{path}: holds no text")
    return tuple(found)


def _is_document(document: Any) -> bool:
    return is_chat(document) if isinstance(document, list) else isinstance(document, str)


def sequences(documents: tuple[Document, ...], folder: Path) -> torch.Tensor:
    """Sequences of a model's tokens, spread evenly over documents that follow each other.

    Args:
        documents: of :func:`read_documents`.
        folder: of the model, with its tokenizer.

    Returns:
        int64 [at most :data:`SEQUENCES`, at most :data:`LENGTH`].

    Raises:
        DumpError: no tokenizer, too little text, a conversation that the model's chat template does not take, or a
            context too short to store anything.
    """
    import jinja2
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        context = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", LENGTH)
    except (OSError, ValueError, KeyError) as error:
        raise DumpError(f"{folder}: --text needs the model's tokenizer ({first_line(error)})") from error
    length = min(LENGTH, int(context))
    if length < 2 * (SINK + RECENT):
        raise DumpError(f"{folder}: a context of {context} tokens is too short for --text")
    ids: list[int] = []
    for number, document in enumerate(documents, 1):
        try:
            ids += _encoded(tokenizer, document)
        except (jinja2.TemplateError, TypeError) as error:
            raise DumpError(
                f"document {number}: the model's chat template does not take it ({first_line(error)})"
            ) from None
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= MOST_TOKENS:
            break
    count = min(SEQUENCES, len(ids) // length)
    if not count:
        raise DumpError(f"the text has {len(ids)} tokens; --text needs {length} or more, {SEQUENCES * length} are good")
    stream = torch.tensor(ids[:MOST_TOKENS])
    starts = torch.linspace(0, len(stream) - length, count).long().tolist()
    return torch.stack([stream[start : start + length] for start in starts])


def _encoded(tokenizer: Any, document: Document) -> list[int]:
    """Token ids; chats go through the model's template, or are joined where it has none."""
    if not isinstance(document, str):
        if getattr(tokenizer, "chat_template", None):
            document = str(tokenizer.apply_chat_template(document, tokenize=False))
        else:
            document = "\n\n".join(message["content"] for message in document)
    return list(tokenizer.encode(document, add_special_tokens=False, verbose=False))
