"""Calibration prompts: GPQA, MMLU, WikiText or a local JSONL of texts or chats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from oscar_rotation.chats import is_chat
from oscar_rotation.errors import first_line
from oscar_tools.calibration.errors import DataError

Chat = list[dict[str, str]]
LocalData = Mapping[str, Path]
"""Data set of the hub -> local copy of it."""

HUB_SETS: dict[str, tuple[str, str, str]] = {
    "GPQA": ("Idavidrein/gpqa", "gpqa_diamond", "train"),
    "MMLU": ("cais/mmlu", "all", "test"),
    "WikiText": ("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
}
"""Name -> hub id, configuration and split."""

SHORTEST_TEXT = 200
"""Characters; WikiText has many headings and empty lines."""


def local_data_sets(text: str, dataset: str) -> LocalData:
    """Local copies of hub sets from an option: a path, which is one of ``dataset``, or ``name=path,...``.

    Raises:
        ValueError: a name that is no data set of the hub, or a part without a path.
    """
    if not text:
        return {}
    if "=" not in text:
        return {dataset: Path(text)}
    paths = named_paths(text)
    unknown = sorted(set(paths) - set(HUB_SETS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(HUB_SETS)}")
    return paths


def named_paths(text: str) -> dict[str, Path]:
    """Paths by name, of ``name=path,...``.

    Raises:
        ValueError: a part without a path.
    """
    parts = text.split(",")
    if wrong := [part for part in parts if "=" not in part]:
        raise ValueError(f"{wrong[0]!r} is not name=path")
    return {name: Path(path) for name, path in (part.split("=", 1) for part in parts)}


def dataset_label(dataset: str) -> str:
    """Name of a data set in folder names: that of a hub set, or the stem of a local file."""
    return dataset if dataset in HUB_SETS else Path(dataset).stem


def calibration_chats(dataset: str, local: Path | None = None) -> Iterator[Chat | str]:
    """Prompts of a data set, in its order.

    Args:
        dataset: "GPQA", "MMLU", "WikiText", or a local .jsonl whose lines have ``text`` or ``messages``.
        local: local copy of a hub set: a file (.jsonl, .csv, .parquet) with its columns.

    Yields:
        a chat as a list of messages, or a plain text.

    Raises:
        DataError: an unknown, missing, gated or malformed data set.
    """
    if dataset in HUB_SETS:
        rows = read_rows(local) if local else hub_rows(*HUB_SETS[dataset])
        yield from _prompts(dataset, rows)
        return
    path = Path(dataset)
    if not path.exists():
        raise DataError(f"{dataset}: neither one of {', '.join(HUB_SETS)} nor a local .jsonl file")
    for number, row in enumerate(read_rows(path), 1):
        if isinstance(row.get("messages"), list):
            if not is_chat(row["messages"]):
                raise DataError(f"{path}:{number}: every one of 'messages' needs a 'role' and a 'content', both text")
            yield row["messages"]
        elif isinstance(row.get("text"), str):
            yield row["text"]
        else:
            raise DataError(f"{path}:{number}: a line needs 'text' or 'messages', it has {sorted(row)}")


def render_chat(tokenizer: Any, messages: Chat, **options: Any) -> str:
    """A conversation as the model's chat template writes it.

    Args:
        tokenizer: of transformers, with a template.
        messages: see :func:`is_chat`.
        options: further ones of ``apply_chat_template``.

    Raises:
        DataError: the template takes no such conversation, some no system message, for instance.
    """
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (jinja2.TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages[:4])
        raise DataError(
            f"the model's chat template does not take a conversation of {roles}{', ...' * (len(messages) > 4)} "
            f"({first_line(error)})"
        ) from None


def _text_of(row: dict[str, Any], column: str, where: str) -> str:
    """What a column says; a table's empty cell is NaN."""
    value = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)) or not str(value).strip():
        raise DataError(f"{where}: the column {column!r} is empty")
    return str(value).strip()


def _prompts(dataset: str, rows: Iterable[dict[str, Any]]) -> Iterator[Chat | str]:
    for number, row in enumerate(rows, 1):
        where = f"{dataset}: row {number}"
        try:
            if dataset == "WikiText":
                if isinstance(row["text"], str) and len(row["text"]) >= SHORTEST_TEXT:
                    yield row["text"]
                continue
            if dataset == "MMLU":
                choices = list(row["choices"])
                question = _text_of(row, "question", where)
            else:
                names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
                choices = sorted(_text_of(row, name, where) for name in names)
                question = _text_of(row, "Question", where)
        except KeyError as error:
            raise DataError(f"{where} lacks the column {error}, it has {sorted(row)}") from error
        options = "\n".join(f"{letter}) {choice}" for letter, choice in zip("ABCDEFGHIJ", choices, strict=False))
        text = f"Answer the following multiple choice question.\n\n{question}\n\n{options}"
        yield [{"role": "user", "content": text}]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a local .jsonl, .csv or .parquet file.

    Raises:
        DataError: missing, of another type, or broken.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        # Not splitlines(): text may hold other characters that end a line, which JSON leaves as they are.
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is no UTF-8 ({error.reason} at byte {error.start})") from None
        for number, line in enumerate(content.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a {type(row).__name__}, expected an object")
            yield row
        return
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path}: expected .jsonl, .csv or .parquet")
    import pandas

    try:
        frame = pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    yield from frame.to_dict("records")  # type: ignore[misc]


def hub_rows(repo: str, configuration: str, split: str) -> Iterator[dict[str, Any]]:
    """Rows of a data set on the hub, or in its local cache.

    Raises:
        DataError: gated, missing or out of reach.
    """
    import datasets

    try:
        rows = datasets.load_dataset(repo, configuration, split=split)
    except Exception as error:  # the datasets library raises whatever its file systems do
        raise DataError(explain_hub_failure(repo, error)) from error
    yield from rows


def explain_hub_failure(repo: str, error: Exception, variable: str = "DATASET_PATH") -> str:
    """One line on why a data set could not be had and what to do; ``variable`` takes a local copy."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if "gated" in str(error).lower() or "401" in text or "403" in text:
        return (
            f"{repo}: access is restricted; accept its terms at https://huggingface.co/datasets/{repo} and log in "
            f"with `hf auth login`, or give a local copy ({variable})"
        )
    return f"{repo}: cannot be had from the hub ({text[:160]}); give a local copy ({variable})"
