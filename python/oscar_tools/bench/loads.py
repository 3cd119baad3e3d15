"""What ``oscar bench`` measures, in sizes that fit the card."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from oscar_tools.bench.synthetic import QWEN3_8B, Heads
from oscar_tools.bench.timing import MOST_READ, layers_of

SHARE = 0.75
"""Of the free memory that a load may take in BF16."""


class Load(NamedTuple):
    """Requests that decode, with as many tokens each."""

    requests: int
    tokens: int


class Sizes(NamedTuple):
    """Sizes of every measurement.

    Attributes:
        heads: of the layer.
        decode: loads.
        verify: loads of which a request verifies ``drafts`` new tokens.
        store: tokens of a step.
        extend: requests, and of each the tokens before its chunk and of its chunk.
        read: bytes of the probe of the bandwidth.
    """

    heads: Heads = QWEN3_8B
    decode: tuple[Load, ...] = (Load(1, 100_000), Load(8, 32_768), Load(32, 32_768), Load(32, 100_000))
    verify: tuple[Load, ...] = (Load(1, 100_000), Load(8, 16_384))
    drafts: int = 4
    store: tuple[int, ...] = (1, 32, 256)
    extend: tuple[tuple[int, int, int], ...] = ((1, 0, 8192), (1, 32_768, 2048))
    read: int = MOST_READ

    def fitting(self, free: int) -> Sizes:
        """The same, no larger than ``free`` bytes hold."""
        decode, verify = (tuple(dict.fromkeys(self._fit(loads, free))) for loads in (self.decode, self.verify))
        return self._replace(decode=decode, verify=verify, read=min(self.read, free // 4))

    def _fit(self, loads: Iterable[Load], free: int) -> Iterable[Load]:
        for load in loads:
            requests, tokens = load
            while self._taken(Load(requests, tokens)) > SHARE * free and tokens > 1024:
                requests, tokens = (requests // 2, tokens) if requests > 1 else (requests, tokens // 2)
            yield Load(requests, tokens)

    def _taken(self, load: Load) -> int:
        size = load.requests * load.tokens * 2 * self.heads.kv * self.heads.head_dim * 2
        return layers_of(size) * size
