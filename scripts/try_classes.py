"""Write the table of classes of models: which are served, which are refused, and why.

    python scripts/try_classes.py                 # every class that the table lacks
    python scripts/try_classes.py CLASS ...       # these
    python scripts/try_classes.py --all

A class is served if a small random model of it answers as with stock SGLang (oscar_tools.trial); shapes are in
scripts/model_classes, of models that see images in seeing.py. Runs without a GPU, in a second or two a class.
"""

from __future__ import annotations

import csv
import os
import re
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from model_classes import seeing, shapes
from model_classes.known import known
from model_classes.registered import classes

from oscar_cpu.server import environment
from oscar_tools.trial import trial
from sglang_oscar.attach.model_classes import REFUSED, SERVED, TABLE, UNTRIED, Row, rows

FORKED = "OSCAR_TRY_CLASSES"


def tried(name: str, folder: Path) -> Row:
    """What a trial of a class says."""
    of = next((of for of in (shapes, seeing) if name in of.SHAPES), None)
    if of is None:
        return Row(UNTRIED, "no small configuration is known")
    model = of.save(name, folder / name)
    write({other: row for other, row in read().items() if other != name})  # what was refused is tried anew
    rows.cache_clear()
    outcome = trial.try_model(model, ["--trust-remote-code"])
    print(f"{name}: {outcome}", flush=True)
    if outcome.passed:
        return Row(SERVED, f"tried: {outcome}")
    if outcome.refused:
        return Row(REFUSED, re.split(r": | \(layer |;", str(outcome).partition(" does not support ")[2])[0])
    return Row(UNTRIED, str(outcome))


def main(arguments: list[str]) -> None:
    """Fill the table."""
    names = sorted({*rows(), *classes(Path(find_spec("sglang.srt.models").submodule_search_locations[0]))})
    asked = [name for name in arguments if not name.startswith("-")]
    trial.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        for name in asked or names:
            if asked or "--all" in arguments or name not in read():
                row = known(name) or tried(name, Path(folder))
                write({**read(), name: row})


def read() -> dict[str, Row]:
    """The table as it is now: somebody else may write it, too."""
    rows.cache_clear()
    return rows()


def write(table: dict[str, Row]) -> None:
    """Write the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("class", "int2", "known"))
        writer.writerows((name, row.int2, row.known) for name, row in sorted(table.items()))


if __name__ == "__main__":
    if FORKED not in os.environ:  # variables of a CPU server must be there before the interpreter starts
        os.execve(sys.executable, [sys.executable, *sys.argv], environment() | {FORKED: "1"})
    main(sys.argv[1:])
