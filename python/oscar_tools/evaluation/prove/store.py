"""Answers on disk, as they come: a run that ends early loses nothing, and answers to other questions never mix.

A *cell* is one measure of one cache. Its file is ``cells/<cache>/<measure>-<fingerprint>.jsonl``: the settings that
its answers depend on, then one line per answer. Other settings have another fingerprint, and so another file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oscar_rotation.atomic import write_atomically
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import held

DIGITS = 12
"""Of a fingerprint, in file names."""


def fingerprint(settings: dict[str, Any]) -> str:
    """Hexadecimal digits that differ where settings do; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:DIGITS]


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While inside, no other run writes this folder, which is made where it is missing.

    Raises:
        DataError: another one does.
        OSError: it cannot be made.
    """
    taken = DataError(f"{folder}: another `oscar prove` writes to it; wait until it is done, or name another --out")
    with held(folder / ".lock", taken):
        yield


class Cell:
    """Answers of one cache to one measure.

    Args:
        path: file of the answers; read if it is there.
        settings: all that the answers depend on.

    Attributes:
        done: unit -> answer.
        left_out: why the measure cannot be asked of this cache; None where it can.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.done: dict[str, dict[str, Any]] = {}
        self.left_out: str | None = None
        if not path.exists():
            return
        whole = path.read_bytes()
        # The last line of a run that was killed may be half a line; what follows must not be glued to it.
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:
            path.write_bytes(kept)
        for line in kept.decode("utf-8").splitlines()[1:]:
            row = json.loads(line)
            if "left_out" in row:
                self.left_out = row["left_out"]
            else:
                self.done[row["unit"]] = row["answer"]

    def add(self, unit: str, answer: dict[str, Any]) -> None:
        """Keep an answer.

        Raises:
            OSError: it cannot be written.
        """
        self._append({"unit": unit, "answer": answer})
        self.done[unit] = answer

    def leave_out(self, reason: str) -> None:
        """Note that the measure cannot be asked."""
        self._append({"left_out": reason})
        self.left_out = reason

    def _append(self, row: dict[str, Any]) -> None:
        new = not self.path.exists() or not self.path.stat().st_size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if new:
                file.write(json.dumps({"settings": self.settings}, sort_keys=True) + "\n")
            file.write(json.dumps(row) + "\n")

    def arrays(self, unit: str) -> Path:
        """File of the arrays that belong to a unit."""
        return self.path.with_suffix("") / f"{unit}.npz"

    def write_arrays(self, unit: str, **arrays: np.ndarray) -> None:
        """Keep arrays of a unit; they appear whole or not at all."""

        def fill(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]

        write_atomically(self.arrays(unit), fill)

    def read_arrays(self, unit: str) -> dict[str, np.ndarray]:
        """Arrays of a unit by name.

        Raises:
            OSError: there are none.
        """
        with np.load(self.arrays(unit)) as file:
            return {name: file[name] for name in file.files}


class Store:
    """All cells of an output folder.

    Args:
        folder: where to; made when the first answer comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cells"

    def clear(self) -> None:
        """Forget all answers."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def cell(self, cache: str, measure: str, settings: dict[str, Any]) -> Cell:
        """The cell of a cache and a measure with exactly these settings."""
        return Cell(self.folder / cache / f"{measure}-{fingerprint(settings)}.jsonl", settings)
