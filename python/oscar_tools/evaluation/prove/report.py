"""From answers to files: ``prove.json``, ``prove.md`` and plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.errors import ReportError
from oscar_tools.evaluation.prove.caches import BF16, Cache
from oscar_tools.evaluation.prove.measures import Material
from oscar_tools.evaluation.prove.page import page
from oscar_tools.evaluation.prove.plots import draw
from oscar_tools.evaluation.prove.rates import counts, cut_warning
from oscar_tools.evaluation.prove.run import Outcome, Proof

STEM = "prove"
NOTHING = counts(0, ())


def collect(
    proof: Proof, caches: Sequence[Cache], outcome: Outcome, material: Material, machine: dict[str, str], command: str
) -> dict[str, Any]:
    """Results as JSON values.

    Returns:
        ``model``, ``machine``, ``command``, ``lengths``, ``text``, ``size``, ``measures`` (name -> title), ``remarks``,
        and ``caches``: one dict per cache with ``name``, ``title``, ``bits``, ``server`` (JSON of
        :class:`ServerFacts`), ``args``, ``env``, ``chunk``, ``fitted_for``, ``seconds`` and ``figures`` (measure ->
        what :meth:`Measure.figures` gives).
    """
    rows = []
    for cache in caches:
        figures = {}
        for measure in proof.of(cache):
            answers = outcome.cells[cache.name][measure.name].done
            # Where BF16 could not be asked there is nothing to pair with.
            reference = None if cache.name == BF16 else outcome.cells[BF16][measure.name].done or None
            if answers:
                figures[measure.name] = measure.figures(answers, reference)
        server = outcome.facts(cache)
        title, bits = (cache.title, None) if server is None else (cache.named(server), server["bits"])
        row = {"name": cache.name, "title": title, "bits": bits, "server": server, "args": cache.args}
        row |= {"env": cache.env, "chunk": cache.chunk, "fitted_for": cache.fitted_for()}
        rows.append(row | {"seconds": outcome.seconds.get(cache.name), "figures": figures})
    return {
        "model": proof.settings.title,
        "machine": machine,
        "command": command,
        "lengths": material.lengths,
        "text": material.texts.name,
        "size": material.size.name,
        "measures": {measure.name: measure.title for measure in proof.measures},
        "remarks": [
            *outcome.remarks,
            *(f"{', '.join(titles)}: {reason}" for reason, titles in outcome.unavailable.items()),
            *_cut_off(proof, rows),
        ],
        "caches": rows,
    }


def _cut_off(proof: Proof, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line for every cache and measure with too many answers that reached their limit."""
    for row in rows:
        for measure in proof.measures:
            warning = cut_warning(row["figures"].get(measure.name, {}).get("counts", NOTHING))
            if warning:
                yield f"{row['title']}, {measure.title}: {warning}"


def write_report(results: dict[str, Any], folder: Path) -> Path:
    """Write JSON, plots and page; without matplotlib the page says why it has no plots.

    Returns:
        the page.

    Raises:
        OSError: a file cannot be written.
    """
    try:
        plots = draw(results, folder)
    except ReportError as error:
        plots = {}
        results["remarks"].append(str(error))
    texts = {".json": json.dumps(results, indent=1) + "\n", ".md": page(results, plots)}
    for suffix, text in texts.items():
        write_text_atomically(folder / f"{STEM}{suffix}", text)
    return folder / f"{STEM}.md"
