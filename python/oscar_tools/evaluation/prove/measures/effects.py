"""Two effects of a cache that a server chooses itself: whether a prompt is found in it, and the size of chunks."""

from __future__ import annotations

import numpy as np

from oscar_tools.evaluation.intervals import clustered_bootstrap
from oscar_tools.evaluation.prove.asking import Client
from oscar_tools.evaluation.prove.divergence import kl_lower_bound
from oscar_tools.evaluation.prove.measures.base import Answer, Answers, Figures
from oscar_tools.evaluation.prove.measures.tail_kl import TailKl, paired_excess, said
from oscar_tools.evaluation.prove.sizes import TAIL
from oscar_tools.evaluation.prove.store import Cell


class Effects(TailKl):
    """Tails of texts are read cold, as a server reads a prompt that it has not seen, and behind their cached prefix.

    Cold, a prompt is computed in chunks (``--chunked-prefill-size``), and each chunk reads those before it from the
    cache; what belongs to one chunk is read as it was computed. So a cache of few bits answers a prompt that it has
    seen otherwise than one that it has not, and small chunks cost accuracy. Of BF16 both are rounding.
    """

    name, title = "effects", "Cold against cached, and chunk size"

    def count(self) -> int:
        """Texts per length."""
        return self.material.size.cold

    def ask(self, client: Client, unit: str, cell: Cell, reference: Cell | None) -> Answer:
        """KL and differences of log probability of one tail, cold against cached; cold also against BF16 read cold."""
        ids, top = self.documents[unit], self.material.size.top
        begin = len(ids) - TAIL
        text = np.array(ids[begin + 1 :])
        cached, cold = client.read(ids, begin, top), client.read(ids, begin, top, cached=False)
        found = {
            "kl": _short(kl_lower_bound(cold, cached, text)),
            "moved": _short(np.abs(cached.read - cold.read)),
            "cold_nats": float(-cold.read.mean(dtype=np.float64)),
        }
        if reference is None:
            cell.write_arrays(unit, ids=cold.ids, logprobs=cold.logprobs, read=cold.read)
            return found
        return found | {"cold_kl": _short(kl_lower_bound(said(reference, unit), cold, text))}

    def of(self, groups: list[list[str]], answers: Answers, reference: Answers | None) -> Figures:
        """``kl`` and ``moved`` per token, cold against cached; ``cold_kl``, ``cold_nats`` and ``cold_excess`` of texts
        that are read cold, against BF16."""
        units = [unit for group in groups for unit in group]
        found: Figures = {"documents": len(units)}
        for name in ("kl", "moved", "cold_kl"):
            if name in answers[units[0]]:
                parts = [np.concatenate([np.array(answers[unit][name]) for unit in group]) for group in groups]
                found[name] = clustered_bootstrap(parts, np.mean).to_json()
        found["cold_nats"] = float(np.mean([answers[unit]["cold_nats"] for unit in units]))
        if excess := paired_excess(groups, answers, reference, "cold_nats"):
            found["cold_excess"] = excess
        return found


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{x:.6g}") for x in values]
