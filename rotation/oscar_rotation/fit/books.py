"""Codebooks of keys: points that k-means places for the fours of channels of a layer, behind the transform.

All kv heads and places share them, each times how long its fours are. Keys are as near to them as to points of their
own, and a kernel looks them up in 1 KB in place of 32 KB a kv head.

A key counts half by the attention that it gets and half like every other; tokens of the sink, which a server keeps in
16 bits, count nothing. Every key is moved to a place of its own in the context: points must fit all of them. Points see
keys over their root mean square, and errors count as they are, not relative to a key's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import torch

from oscar_kernels.codebook import GROUP, POINTS, Codebook
from oscar_rotation.dump import DumpReader
from oscar_rotation.dump.stream import stream_chunks
from oscar_rotation.errors import of_layer
from oscar_rotation.files.codebooks import Codebooks
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.held_out import Request, requests
from oscar_rotation.fit.layer import Progress
from oscar_rotation.fit.side_codes import into
from oscar_rotation.math.attention_weights import key_weights, mixed
from oscar_rotation.math.group_books import rms, shared_book
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rotary_center import turned
from oscar_rotation.threads import one_thread

SHARE, ROUNDS = 0.5, 20
"""Of attention in what a key counts; of Lloyd's algorithm."""

MOST_KEYS = 1 << 14
"""Keys of a kv head that points are placed by, at most, spread evenly over the dump: 64 for each point."""

EARLY = 4
"""Of what points are placed by, one in so many is looked at in the first three quarters of the rounds."""


def weighted_keys(
    found: Iterable[Request], scale: float, share: float = SHARE, step: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of requests and what they count.

    Args:
        found: requests, which are not kept.
        scale: factor on the logits.
        share: of attention in the weights; the rest is the same for all keys.
        step: from one key that is taken to the next; the weights of all have mean 1.

    Returns:
        float32 [kv_heads, n, d] and [kv_heads, n]; tokens of the sink weigh nothing.
    """
    keys, weights, begin = [], [], 0
    for request in found:
        k = request.k
        keys.append(k[:, -begin % step :: step].clone())
        weights.append(key_weights(request.q, k, scale, request.sinks) if share else torch.ones_like(k[..., 0]))
        begin += k.shape[1]
    return torch.cat(keys, 1), torch.cat(mixed(weights, share), 1)[:, ::step]


def places(positions: Positions, longest: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of how far each of ``count`` keys is moved along, float32 [count, r]: as often to every place
    as the moments of the transforms are, in no order.

    Args:
        positions: that keys may have.
        longest: tokens of the longest request.
        count: keys.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    cos, sin = positions.tables(positions.offsets(longest, count)[order])
    return cos.float(), sin.float()


def fit_books(
    dump: DumpReader,
    keys: RotationSet,
    positions: Positions | None,
    device: torch.device,
    held: Mapping[int, int],
    progress: Progress | None = None,
) -> Codebooks:
    """Codebooks of all layers.

    Args:
        dump: that transforms were fitted to.
        keys: their transforms.
        positions: that keys may have; None for those that they had.
        device: to fit on.
        held: requests that are left out, chunk -> the first of them.
        progress: told about every chunk.

    Raises:
        DumpError: the dump is broken.
    """
    chunks = dump.fit_chunks()
    fitted = {chunk: dump.seq_lens(0, chunk)[: held.get(chunk)] for chunk in chunks}
    lengths = [length for lens in fitted.values() for length in lens]
    step = -(-sum(lengths) // MOST_KEYS)
    tables = None if positions is None else places(positions, max(lengths), -(-sum(lengths) // step))
    scale = (dump.manifest.sm_scale if dump.manifest else None) or keys.head_dim**-0.5
    stream = stream_chunks(dump, [(layer, chunk) for layer in range(dump.num_layers) for chunk in chunks], device)
    books: list[Codebook | None] = []
    for layer in range(dump.num_layers):

        def of_chunks(layer: int = layer) -> Iterable[Request]:
            for index, chunk in enumerate(islice(stream, len(chunks))):
                yield from requests(chunk.split(len(fitted[chunks[index]]))[0], dump.sink_logits(layer))
                if progress is not None:
                    progress(layer * len(chunks) + index + 1, dump.num_layers * len(chunks))

        x, weights = weighted_keys(of_chunks(), scale, step=step)
        if tables is not None:
            x = turned(x, *(table.to(x.device) for table in tables))
        with of_layer(layer), one_thread():
            books.append(codebook(into(keys, layer, x), weights, layer))
    return Codebooks.of_layers(books)


def codebook(y: torch.Tensor, weights: torch.Tensor, seed: int) -> Codebook:
    """The codebook of one layer: all kv heads and places have the same points, each times a factor of its own.

    Args:
        y: keys behind the transform, float32 [kv_heads, n, head_dim].
        weights: float32 [kv_heads, n].
        seed: of the draw of keys and of the first points.
    """
    size = rms(y)
    points, lengths = shared_book(y / size, weights * size[..., 0].square(), GROUP, POINTS, ROUNDS, seed, EARLY)
    return Codebook.from_shared(points, lengths)
