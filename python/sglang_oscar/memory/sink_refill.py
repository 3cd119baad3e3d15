"""Sink blocks that have to be computed again: a prefix hit whose rows are all cached, but whose sink block is gone.

There are fewer sink blocks than cached beginnings. The sink of a prefix depends on nothing but its own first tokens, so
one short forward pass over these (:mod:`sglang_oscar.attention.refill_pass`) brings it back, and hits never end at it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_oscar import metrics
from sglang_oscar.memory.images import SinkImages


@dataclass(frozen=True)
class Refill:
    """Block ``block`` of the sink store is to hold the keys and values of ``token_ids``, a whole sink or its beginning.

    ``images`` are those that some of these tokens belong to; None where all are text. ``adapter`` is SGLang's id of the
    LoRA adapter that computes them; None for the model itself.
    """

    block: int
    token_ids: tuple[int, ...]
    images: SinkImages | None = None
    adapter: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that computing the block takes: its own, or as many as the vision tower computes for them."""
        return max(len(self.token_ids), 0 if self.images is None else self.images.tokens)


class SinkRefills(dict[int, Refill]):
    """By block, refills that the next forward pass has to do first, and how many there have been (``total``).

    A queued block may be shared by then, and its request may be gone: the refill is done all the same, because others
    rely on the block. If nobody did, the block may have been given to another request meanwhile, with a refill of its
    own: that one alone is done, as both would write the same slots in one pass, in any order.
    """

    total = 0

    def add(
        self, block: int, token_ids: tuple[int, ...], images: SinkImages | None = None, adapter: str | None = None
    ) -> None:
        """Queue a refill, in place of an earlier one of the same block."""
        self[block] = Refill(block, token_ids, images, adapter)

    def take(self) -> list[Refill]:
        """All queued refills, which are counted and queued no longer."""
        taken = list(self.values())
        self.clear()
        self.total += len(taken)
        metrics.count("sink_refills", len(taken))
        return taken
