"""How much is asked."""

from __future__ import annotations

from dataclasses import dataclass

TAIL = 256
"""Tokens that are read behind a cached prefix; as many as an int2 server computes again, so that no token of the
prefix is."""
SHORTEST = 1024
"""Tokens of a context at least: sink, recent window and tail leave 448 that are read in 2 bits."""
LONGEST_DEFAULT = 32768
"""Tokens; longer contexts are asked about only where the user names them."""
UNIT = 64
"""Tokens; default lengths are multiples."""
ROOM = 64
"""Tokens between a context and the model's limit, for questions and answers."""
RECALL = 6144
"""Tokens of a module whose functions are recalled."""
ANSWER = 640
"""Tokens between a module and the model's limit, for the request and an answer of common length."""


@dataclass(frozen=True)
class Size:
    """Numbers of a run.

    Attributes:
        name: "full" or "reduced".
        longest: tokens of the longest default context at most.
        documents: texts per length whose tails are read.
        top: most likely tokens that servers tell per place.
        depths: places of a hidden fact.
        questions: per length, depth and task of retrieval.
        sessions, turns: growing conversations.
        records: JSON records per length.
        functions: to be recalled, per length.
        calibration_tokens: dumped, where rotations are fitted.
        at_once: requests in flight.
        cold: texts per length that are read cold, too.
    """

    name: str
    longest: int
    documents: int
    top: int
    depths: int
    questions: int
    sessions: int
    turns: int
    records: int
    functions: int
    calibration_tokens: int
    at_once: int
    cold: int = 8

    def lengths(self, context: int) -> tuple[int, ...]:
        """Default context lengths for a model of ``context`` tokens, ascending: a quarter, half and all of it, as far
        as it is asked about.

        >>> SIZES["full"].lengths(8192), SIZES["reduced"].lengths(8192)
        ((2048, 4096, 8128), (1024, 2048))
        """
        top = min(context - ROOM, self.longest) // UNIT * UNIT
        parts = {-(-top // share // UNIT) * UNIT for share in (4, 2, 1)}
        return tuple(sorted(n for n in parts if n >= SHORTEST))

    def recall_lengths(self, context: int) -> tuple[int, ...]:
        """Default length of modules whose functions are recalled; none where the model takes too little.

        >>> [SIZES[name].recall_lengths(n) for name, n in (("full", 32768), ("reduced", 8192), ("full", 1024))]
        [(6144,), (2048,), ()]
        """
        length = min(RECALL, self.longest, (context - ANSWER) // UNIT * UNIT)
        return (length,) if length >= SHORTEST else ()


SIZES = {
    "full": Size("full", LONGEST_DEFAULT, 32, 128, 5, 8, 8, 70, 24, 120, 32768, 32),
    "reduced": Size("reduced", 2048, 3, 128, 3, 1, 1, 24, 3, 6, 8192, 2, 2),
}
