"""Text to calibrate on and text to measure on: two parts of one source that share no document."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from oscar_tools.calibration import local_text
from oscar_tools.calibration.data import calibration_chats, render_chat
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.local_text import Messages, Render

CALIBRATION, MEASUREMENT = "calibration", "measurement"
PIECE = 4000
"""Characters from which on a plain text file is cut at the next empty line: each piece is a document."""

LINES = 20_000
"""Lines that documents with hidden facts are made of."""

Kinds = dict[str, list[str]]
"""Kind of text -> documents."""


def part_of(document: str) -> str:
    """The part that a document belongs to, by its name or its text: half of them each, always the same."""
    return MEASUREMENT if hashlib.sha256(document.encode()).digest()[0] % 2 else CALIBRATION


def local_documents(part: str, render: Render) -> Kinds:
    """Text that this machine has (:mod:`local_text`), by kind; no text is in both parts."""
    files = local_text.python_sources()
    named: dict[str, Iterable[tuple[str, str]]] = {
        "source": files.items(),
        "docs": local_text.reference_topics(),
        # A docstring is in the part of its file.
        "chat": local_text.conversations({n: t for n, t in files.items() if part_of(n) == part}, render),
        "descriptions": ((f"package {name}", text) for name, text in local_text.package_descriptions()),
    }
    return {kind: _of_part(documents, part) for kind, documents in named.items()}


def python_documents(part: str) -> list[str]:
    """Python sources of this machine, as in :func:`local_documents`."""
    return _of_part(local_text.python_sources().items(), part)


def _of_part(documents: Iterable[tuple[str, str]], part: str) -> list[str]:
    first: dict[str, str] = {}
    for name, text in documents:
        first.setdefault(text, name)  # Copies are in the part of the first.
    return [text for text, name in first.items() if part_of(name) == part]


def file_documents(path: Path, part: str, render: Render) -> Kinds:
    """Documents of a user's file: lines of a .jsonl with ``text`` or ``messages``, or stretches of a .txt.

    Raises:
        DataError: the file is missing, broken or of another kind.
    """
    if path.suffix == ".jsonl":
        rows = calibration_chats(str(path))
        texts = []
        for number, row in enumerate(rows, 1):
            try:
                texts.append(row if isinstance(row, str) else render(row))
            except DataError as error:
                raise DataError(f"{path}: document {number}: {error}") from None
    elif path.suffix == ".txt":
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        texts = list(_stretches(path.read_text(encoding="utf-8", errors="replace")))
    else:
        raise DataError(f"{path}: expected .jsonl or .txt")
    return {path.stem: [text for text in dict.fromkeys(texts) if part_of(text) == part]}


def _stretches(text: str) -> Iterator[str]:
    held: list[str] = []
    for paragraph in text.split("\n\n"):
        held.append(paragraph)
        if sum(map(len, held)) >= PIECE:
            yield "\n\n".join(held) + "\n"
            held = []
    if held:
        yield "\n\n".join(held) + "\n"


class Texts:
    """Documents of both parts, as tokens of one model.

    Args:
        tokenizer: of transformers.
        path: a user's file; None reads what this machine has.

    Attributes:
        leading: token ids that the model expects in front of every text, such as a BOS.
        name: of the source, for the page.
    """

    def __init__(self, tokenizer: Any, path: Path | None = None) -> None:
        self.tokenizer, self.path = tokenizer, path
        self.render = local_text.renderer(tokenizer)
        self.name = "this machine's Python sources, documentation, chat and descriptions" if path is None else str(path)
        # Measures encode from several threads; a tokenizer may be set up anew by a call.
        self.lock = threading.Lock()
        self.leading = local_text.leading(tokenizer)
        self.known: dict[str, Kinds] = {}
        self.known_lines: dict[str, tuple[str, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        with self.lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def chat_ids(self, messages: Messages) -> list[int]:
        """Token ids of a conversation whose next turn is the model's, through its template or as plain text."""
        if getattr(self.tokenizer, "chat_template", None):
            # Templates without a thinking mode ignore the last argument; thinking would use up the short answers.
            text = render_chat(self.tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
            return self.encode(text)
        return self.leading + self.encode(f"{local_text.plain_chat(messages)}Assistant:")

    def chat_frame(self) -> tuple[list[int], str]:
        """What stands around all that a user says in a first message.

        Returns:
            token ids in front of it; the text behind it, the beginning of the model's turn included.
        """
        mark = "What the user says."
        if not getattr(self.tokenizer, "chat_template", None):
            head, _, tail = f"{local_text.plain_chat([{'role': 'user', 'content': mark}])}Assistant:".partition(mark)
            return self.leading + self.encode(head), tail
        messages = [{"role": "user", "content": mark}]
        text = render_chat(self.tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
        head, _, tail = text.partition(mark)
        return self.encode(head), tail

    def chat_stops(self) -> list[str]:
        """Text behind which a model without a chat template would go on to speak for the user."""
        return [] if getattr(self.tokenizer, "chat_template", None) else ["\n\nUser:"]

    def documents(self, part: str) -> Kinds:
        """Documents of a part, by kind.

        Raises:
            DataError: the user's file cannot be read.
        """
        if part not in self.known:
            make = local_documents if self.path is None else lambda *a: file_documents(self.path, *a)  # type: ignore[arg-type]
            self.known[part] = make(part, self.render)
        return self.known[part]

    def windows(self, part: str, count: int, length: int, at_least: int | None = None) -> list[list[int]]:
        """Windows of ``length`` tokens that do not overlap, from all kinds in turn, ``leading`` in front of each.

        Args:
            part: calibration or measurement.
            count: how many.
            length: tokens of each.
            at_least: so many do, too, if the source holds no more.

        Raises:
            DataError: the source holds too few tokens.
        """
        body = length - len(self.leading)
        streams = [self._windows(texts, body) for texts in self.documents(part).values()]
        # Kinds take turns; where one is used up the others go on.
        turns = chain.from_iterable(zip_longest(*streams))
        found = [self.leading + window for window in islice((x for x in turns if x is not None), count)]
        needed = count if at_least is None else min(at_least, count)
        if len(found) < needed:
            raise DataError(
                f"{self.name}: makes {len(found)} {part} texts of {length} tokens, {needed} are needed; "
                "give more with --text, or ask for shorter --lengths or a smaller --size"
            )
        return found

    def _windows(self, texts: Sequence[str], length: int) -> Iterator[list[int]]:
        end = self.tokenizer.eos_token_id
        held: list[int] = []
        for text in texts:
            held += self.encode(text)
            if end is not None:
                held.append(end)
            while len(held) >= length:
                yield held[:length]
                held = held[length:]

    def lines(self, part: str) -> tuple[str, ...]:
        """The first :data:`LINES` lines of a part, each with its line break, for documents with hidden facts.

        Raises:
            DataError: there are none.
        """
        if part in self.known_lines:
            return self.known_lines[part]
        kinds = self.documents(part)
        texts = chain.from_iterable(kinds.values())
        lines = (line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n"))
        found = tuple(islice(lines, LINES))
        if not found:
            raise DataError(f"{self.name}: holds no lines for the {part} part; give more with --text")
        self.known_lines[part] = found
        return found

    def fingerprint(self, part: str) -> str:
        """SHA-256 of the documents of a part: whether two runs read the same."""
        digest = hashlib.sha256()
        for kind, texts in self.documents(part).items():
            digest.update(kind.encode())
            for text in texts:
                digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()
