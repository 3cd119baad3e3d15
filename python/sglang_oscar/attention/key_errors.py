"""How much of what queries read of keys their codes get wrong, layer by layer, on the traffic of a running server.

Matrices are fitted to the weights of the fit. A trainer's weights move away, and answers get worse without a word: so
errors are compared with those that the fit had, as the file of the keys states them.
"""

from __future__ import annotations

import logging

import torch

from oscar_kernels.key_error import LEAST, MOST, logit_errors
from sglang_oscar import metrics
from sglang_oscar.attention.call import Call
from sglang_oscar.memory.cache import Int2Cache

logger = logging.getLogger(__name__)

EVERY, CHUNKS = 4, 8
"""One of so many such passes is measured; so many make a result."""
TOO_MUCH = 2.0


class KeyErrors:
    """Relative squared error of logits by the codes of keys (:func:`oscar_kernels.key_error.logit_errors`).

    Args:
        cache: of the server's model. Layers whose keys are exact are not measured. Where the file of its keys states no
            errors, those of the first chunks stand in, and a line says so.
    """

    def __init__(self, cache: Int2Cache) -> None:
        self._cache = cache
        coded = [
            layer_id
            for layer_id, layer in cache.layers.items()
            if not all(part.format.key_layout.exact for part in layer.parts)
        ]
        self._place = {layer_id: index for index, layer_id in enumerate(coded)}
        self._sums = torch.zeros(2, len(coded), device=cache.seats.device)
        self._passes = self._chunks = 0
        self._restart()

    def _restart(self) -> None:
        """Compare with the fit of the cache's keys as they are now."""
        self._fingerprint = self._cache.fingerprint
        self._sums.zero_()
        self._chunks, self._warned = 0, False
        stated = self._cache.key_errors
        self._base = None if stated is None else [stated[layer_id] for layer_id in self._place]
        self._of = "the first chunks" if stated is None else "the fit"
        if stated is None and self._place:
            logger.info("int2 key error: rotations state none of their fit; the first chunks served stand in for it")

    def begin(self, tokens: int) -> bool:
        """Whether a pass over so many tokens is to be measured; says what the ones before it gave.

        Waits for the device once in ``EVERY * CHUNKS`` passes.
        """
        if not self._place or tokens < LEAST:
            return False
        self._passes += 1
        if (self._passes - 1) % EVERY:
            return False
        if self._fingerprint != self._cache.fingerprint:
            self._restart()
        if self._chunks == CHUNKS:
            errors, energies = self._sums.tolist()
            if min(energies) > 0:  # else of a server that warms up, whose keys are zeros
                self._say([error / energy for error, energy in zip(errors, energies, strict=True)])
            self._sums.zero_()
            self._chunks = 0
        self._chunks += 1
        return True

    def add(self, call: Call, tokens: int) -> None:
        """Measure a layer, whose rows are stored.

        Args:
            call: of the layer.
            tokens: of the batch, without padding.
        """
        if (at := self._place.get(call.layer_id)) is None:
            return
        of = slice(max(tokens - MOST, 0), tokens)
        for part, own in call.apart(self._cache.layers[call.layer_id]):
            rows = part.cache.k_rows[call.out_cache_loc[of].long()]
            self._sums[:, at] += logit_errors(own.q[of], own.k[of], rows, part.format.key, part.format.key_layout)

    def _say(self, errors: list[float]) -> None:
        """Publish errors by layer, and warn once when that of a layer has doubled."""
        self._base = self._base or errors
        growth = [error / max(base, 1e-30) for error, base in zip(errors, self._base, strict=True)]
        for name, values in (("key_error", errors), ("key_error_growth", growth)):
            metrics.publish_layers(name, dict(zip(self._place, values, strict=True)))
        worst = max(range(len(growth)), key=growth.__getitem__)
        if growth[worst] > TOO_MUCH and not self._warned:
            self._warned = True
            logger.warning(
                "int2 key error: layer %d has %.4f, %.1f times that of %s (%.4f): fit rotations again to these weights",
                list(self._place)[worst], errors[worst], growth[worst], self._of, self._base[worst],
            )  # fmt: skip
