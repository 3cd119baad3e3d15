"""One model in one regime: what every method is fitted to and measured on."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import torch

from accuracy import scope
from accuracy.attention import prefill_then_decode
from accuracy.calibration import Calibration, calibrate
from accuracy.material import Material
from accuracy.measures.language import Language
from accuracy.measures.layers import Layers
from accuracy.measures.retrieval import Retrieval
from accuracy.methods.base import Method
from accuracy.session import Session
from oscar_rotation.threads import one_thread

MOST_LOGITS = 1 << 29
"""Of a batch of contexts."""


class Bench:
    """One model in one regime.

    Args:
        model: in that regime.
        material: what it is calibrated on and asked.
        size: how much to measure.
        domain: calibration text of all methods; None for that of each.
    """

    def __init__(self, model: Any, material: Material, size: scope.Size, domain: str | None = None) -> None:
        self.model, self.material, self.size, self.domain = model, material, size, domain
        self.calibrations: dict[str, Calibration] = {}
        if domain:
            self.calibration(domain)  # first: on the way it takes twice the room of what is kept
        first, *others = material.kinds
        ids = material.text(first, size.contexts, size.context)
        self.language = Language(model, ids, size.tail, self._batch(size.context, size.tail))
        self.kinds = {
            kind: Language(
                model,
                material.text(kind, size.kind_contexts, size.kind_context),
                size.kind_tail,
                self._batch(size.kind_context, size.kind_tail),
            )
            for kind in others
        }
        longest = model.config.get_text_config().max_position_embeddings
        self.retrieval = {
            length: Retrieval(
                model,
                material.questions(length, size.documents, size.questions),
                max(1, size.batch_tokens // length),
            )
            for length in size.lengths
            if length < longest
        }

    @cached_property
    def layers(self) -> Layers:
        """Contexts that are measured layer by layer."""
        ids = self.material.text(self.material.kinds[0], self.size.contexts, self.size.context)
        return Layers(one_batch(self.model, ids[: scope.LAYER_CONTEXTS], self.size.tail))

    @cached_property
    def long(self) -> dict[int, Layers]:
        """The same at several lengths."""
        texts = {n: self.material.text(self.material.kinds[0], scope.LONG_CONTEXTS, n) for n in self.size.long_contexts}
        return {n: Layers(one_batch(self.model, ids, 64)) for n, ids in texts.items()}

    def _batch(self, context: int, tail: int) -> int:
        """Contexts at a time, as many as tokens and logits of their tails allow."""
        logits = tail * self.model.config.get_text_config().vocab_size
        return max(1, min(self.size.batch_tokens // context, MOST_LOGITS // logits))

    def calibration(self, domain: str) -> Calibration:
        """Activations of calibration text of a domain."""
        if domain not in self.calibrations:
            self.calibrations[domain] = calibrate(self.model, self.material.calibration(domain))
        return self.calibrations[domain]

    @torch.no_grad()
    def row(self, method: Method) -> dict[str, Any]:
        """Fit a method and measure everything."""
        calibration = self.calibration(self.domain or getattr(method, "domain", "retrieval"))
        begin = time.time()
        # Many small factorizations: threads that wait for each other cost more than they save.
        with one_thread():
            method.fit(calibration)
        row: dict[str, Any] = {
            "table": method.table,
            "source": method.source,
            "fit_seconds": round(time.time() - begin, 1),
            "bits": {str(n): method.bits_per_element(calibration.head_dim, n) for n in (2048, 32768, 131072)},
            "language": self.language.measure(method),
            "retrieval": {
                str(n): task.measure(method)
                for index, (n, task) in enumerate(self.retrieval.items())
                if index == 0 or scope.asked(method, n)
            },
        }
        if method.facts:
            row["facts"] = dict(method.facts)
        if self.kinds:
            row["kinds"] = {kind: language.measure(method) for kind, language in self.kinds.items()}
        if method.table in scope.EVERYWHERE or method.name in scope.FIGURES:
            row["layers"] = self.layers.measure(method)
        if method.name in scope.FIGURES:
            row["language"]["hidden"] = self.language.hidden(method)
            row["kl_by_length"] = {
                str(n): vars_of(layers.measure(method), "attention_kl") for n, layers in self.long.items()
            }
        return row


def one_batch(model: Any, ids: torch.Tensor, tail: int) -> Session:
    """Contexts whose last ``tail`` tokens are decoded."""
    return Session(model, ids, prefill_then_decode(ids.shape[1], ids.shape[1] - tail))


def vars_of(measured: dict[str, Any], name: str) -> dict[str, float]:
    """The interval of one measurement."""
    return measured["intervals"][name]
