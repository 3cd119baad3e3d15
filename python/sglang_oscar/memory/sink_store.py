"""Host-side bookkeeping of the BF16 sink blocks: who owns which block of the sink store.

The first ``sink`` tokens of a request depend on nothing but those tokens and the request's extra key (LoRA,
cache salt), so a block is content-addressed: requests that begin alike share one. A block is *private* while its
request fills it, *published* under its key once it is full, *pinned* while a running request reads it and *idle*,
in least-recently-used order, afterwards. With at least as many blocks as running requests a request always gets one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_oscar.errors import ImpossibleRequestError


class SinkStore:
    """Blocks 1..num_blocks-1; block 0 is a dummy that padded rows of a CUDA graph write to.

    Every tensor-parallel rank runs the same calls in the same order, so ranks agree without communication:
    nothing here depends on time or on hash order.

    Args:
        num_blocks: blocks including the dummy; at least max_running_requests + 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a sink store needs at least 2 blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Forget all content. For use when no request is running."""
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._block_of: OrderedDict[Hashable, int] = OrderedDict()
        self._key_of: dict[int, Hashable] = {}
        self._pins: dict[int, int] = {}

    def holds(self, key: Hashable) -> bool:
        """Whether a block is published under ``key``."""
        return key in self._block_of

    def acquire_shared(self, key: Hashable) -> int | None:
        """Pin the published block of ``key``; None if there is none."""
        block = self._block_of.get(key)
        if block is None:
            return None
        self._block_of.move_to_end(key)
        self._pins[block] = self._pins.get(block, 0) + 1
        return block

    def acquire_private(self) -> int:
        """Pin a block for a request that will fill it, evicting the least recently used idle one if need be.

        Raises:
            ImpossibleRequestError: every block is pinned, which the sizing of the store rules out.
        """
        if self._free:
            block = self._free.pop()
        else:
            key = next((key for key, block in self._block_of.items() if block not in self._pins), None)
            if key is None:
                raise ImpossibleRequestError(f"all {self.num_blocks - 1} sink blocks are pinned by running requests")
            block = self._block_of.pop(key)
            del self._key_of[block]
        self._pins[block] = 1
        return block

    def publish(self, block: int, key: Hashable) -> None:
        """Make a filled private block findable. The first block published under a key stays."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def withdraw(self, block: int) -> None:
        """Make a published block unfindable; those that read it keep it."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def release(self, block: int) -> None:
        """Unpin a block once; it turns idle if published, free otherwise."""
        self._pins[block] -= 1
        if self._pins[block]:
            return
        del self._pins[block]
        if block in self._key_of:
            self._block_of.move_to_end(self._key_of[block])
        else:
            self._free.append(block)
