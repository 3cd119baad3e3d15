"""How far next-token distributions move when what lies before is read from a cache."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from oscar_tools.evaluation.intervals import clustered_bootstrap
from oscar_tools.evaluation.prove.asking import AskingError, Client
from oscar_tools.evaluation.prove.divergence import TopTokens, covered, kl_lower_bound, same_choice
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures, Measure
from oscar_tools.evaluation.prove.sizes import TAIL
from oscar_tools.evaluation.prove.store import Cell
from oscar_tools.evaluation.prove.texts import MEASUREMENT
from oscar_tools.evaluation.significance import paired_test

PERCENTILES = {"p99": 99.0, "p99.9": 99.9}
RUN = 32
"""Tokens in a row that two tails have by chance only where the text repeats itself."""
ALL = "all"
"""Key of the figures over all lengths."""


class TailKl(Measure):
    """The last :data:`sizes.TAIL` tokens of a text are read behind the rest, which is cached.

    KL is that of :mod:`divergence`. The BF16 cache is compared with BF16 that computes the whole text at once: what is
    left is rounding, the floor below which no difference means anything.
    """

    name, title = "tail-kl", "Tail KL, agreement, perplexity"

    def count(self) -> int:
        """Texts per length."""
        return self.material.size.documents

    def settings(self) -> dict[str, Any]:
        """Sizes."""
        top = self.material.size.top
        return {"lengths": self.material.lengths, "documents": self.count(), "tail": TAIL, "top": top}

    def units(self) -> list[str]:
        """``<length>-<number>``."""
        return [f"{length}-{i}" for length in self.material.lengths for i in range(self.count())]

    def prepare(self) -> None:
        """Cut the texts."""
        _ = self.documents

    @cached_property
    def documents(self) -> dict[str, list[int]]:
        """Texts, each with its tail: unit -> token ids.

        Raises:
            DataError: the text source is too short.
        """
        texts, count = self.material.texts, self.count()
        return {
            f"{length}-{i}": ids
            for length in self.material.lengths
            for i, ids in enumerate(texts.windows(MEASUREMENT, count, length))
        }

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """KL, agreement and nats of every token of one tail."""
        ids, top = self.documents[unit], self.material.size.top
        begin = len(ids) - TAIL
        own = client.read(ids, begin, top)
        if reference is None:
            cell.write_arrays(unit, ids=own.ids, logprobs=own.logprobs, read=own.read)
            first, second = own, client.read(ids, begin, top, cached=False)
        else:
            first, second = said(reference, unit), own
        kl = kl_lower_bound(first, second, np.array(ids[begin + 1 :]))
        return {
            "kl": [float(f"{x:.6g}") for x in kl],
            "same": same_choice(first, second).astype(int).tolist(),
            "nats": float(-own.read.mean(dtype=np.float64)),
            "covered": float(covered(first).mean()),
        }

    def figures(self, answers: Answers, reference: Answers | None) -> Figures:
        """By length and over all: mean and percentiles of KL, agreement, nats, excess over BF16 with a paired test."""
        by_length = {str(n): [u for u in answers if u.startswith(f"{n}-")] for n in self.material.lengths}
        groups = {ALL: list(answers)} | by_length
        tails = {unit: self.documents[unit][-TAIL:] for unit in answers}
        return {key: self.of(sharing(units, tails), answers, reference) for key, units in groups.items() if units}

    def of(self, groups: list[list[str]], answers: Answers, reference: Answers | None) -> Figures:
        """Figures over texts; those of a group are scored on the same tokens."""
        return _figures(groups, answers, reference)


def said(reference: Cell, unit: str) -> TopTokens:
    """What BF16 said of a tail.

    Raises:
        AskingError: it is gone.
    """
    try:
        return TopTokens(**reference.read_arrays(unit))
    except OSError as error:
        raise AskingError(f"{error.filename}: what BF16 said is gone; run again with --fresh") from None


def sharing(units: list[str], tails: dict[str, list[int]]) -> list[list[str]]:
    """Units in groups: texts of several lengths are cut from one stream, so that some are scored on the same tokens.

    Args:
        units: texts.
        tails: token ids that are scored, by unit.

    Returns:
        the groups, in the order of their first units. Tails of two groups share no :data:`RUN` tokens in a row.
    """
    group = {unit: unit for unit in units}
    seen: dict[tuple[int, ...], str] = {}
    for unit in units:
        tail = tails[unit]
        for begin in range(max(1, len(tail) - RUN + 1)):
            other = group[seen.setdefault(tuple(tail[begin : begin + RUN]), unit)]
            if other != group[unit]:
                group = {x: other if of == group[unit] else of for x, of in group.items()}
    found: dict[str, list[str]] = {}
    for unit in units:
        found.setdefault(group[unit], []).append(unit)
    return list(found.values())


def _figures(groups: list[list[str]], answers: Answers, reference: Answers | None) -> Figures:
    units = [unit for group in groups for unit in group]
    kl = [np.concatenate([np.array(answers[unit]["kl"]) for unit in group]) for group in groups]
    same = [np.concatenate([np.array(answers[unit]["same"], dtype=np.float64) for unit in group]) for group in groups]
    found: Figures = {"documents": len(units), "tokens": sum(map(len, kl))}
    found["kl"] = {"mean": clustered_bootstrap(kl, np.mean).to_json()} | {
        name: clustered_bootstrap(kl, lambda x, q=q: np.percentile(x, q)).to_json()  # type: ignore[misc]
        for name, q in PERCENTILES.items()
    }
    found["agreement"] = clustered_bootstrap(same, np.mean).to_json()
    found["nats"] = float(np.mean([answers[unit]["nats"] for unit in units]))
    found["covered"] = float(np.mean([answers[unit]["covered"] for unit in units]))
    if excess := paired_excess(groups, answers, reference, "nats"):
        found["excess"] = excess
    return found


def paired_excess(
    groups: list[list[str]], answers: Answers, reference: Answers | None, name: str
) -> dict[str, Any] | None:
    """A figure of answers minus that of BF16, paired by group of texts; None where BF16 answered none of them."""
    common = [kept for group in groups if (kept := [unit for unit in group if unit in (reference or {})])]
    if reference is None or not common:
        return None
    pair = [
        {group[0]: float(np.mean([source[unit][name] for unit in group])) for group in common}
        for source in (reference, answers)
    ]
    return paired_test(pair[:1], pair[1:]).to_json()
