"""Gains of codebooks, by layer.

Noise in a logit makes exp(logit) larger on average, for which keys that are read short make up. How short is best
depends on the layer more than for scalar codes: points are means of the keys near them, so keys that are alike have the
same error, which does not average out. It is chosen on requests that points have not seen, by the energy of the error
of the attention output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oscar_rotation.dump import DumpReader
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bits import measure
from oscar_rotation.fit.held_out import held_out_requests, moved
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.side_codes import into, out_of
from oscar_rotation.math.fitted_rows import coded_by_book
from oscar_rotation.math.positions import Positions
from oscar_rotation.threads import one_thread

GAINS = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9)
"""That are tried; of equals the first."""


def fit_gains(
    dump: DumpReader,
    keys: RotationSet,
    books: Codebooks,
    weights: OutputWeights,
    held: Mapping[int, int],
    positions: Positions | None,
    device: torch.device,
) -> tuple[float, ...]:
    """The best of :data:`GAINS` for each layer.

    Args:
        dump: that transforms and books were fitted to.
        keys: the transforms.
        books: of their layers.
        weights: output projections.
        held: requests to choose on, chunk -> the first of them.
        positions: that keys may have; None for those that they had.
        device: to measure on.

    Raises:
        DumpError: the dump is broken.
    """
    scale = (dump.manifest.sm_scale if dump.manifest else None) or keys.head_dim**-0.5
    found = []
    for layer in range(keys.num_layers):
        held_out = moved(held_out_requests(dump, layer, held, device), positions)
        reader = weights.reader(layer, *held_out[0].v.shape[::2])
        book, errors = books.of_layer(layer).to(device), torch.zeros(len(GAINS), dtype=torch.float64)
        with one_thread():
            for request in held_out:
                read = coded_by_book(into(keys, layer, request.k), book, GAINS)
                errors += measure(request, [out_of(keys, layer, y) for y in read], [], scale, reader)[0][0].sum(-1)
        found.append(GAINS[int(errors.argmin())])
    return tuple(found)
