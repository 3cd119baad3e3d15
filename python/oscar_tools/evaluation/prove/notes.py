"""How to read the page of a run."""

from __future__ import annotations

READING = """Bits are what servers say: per element of keys and values, 16-bit windows included, at 128K tokens. KL is
in nats per token, from BF16, on tokens behind a cached prefix; a lower bound (see below). The KL of BF16 itself is the
floor: the same text computed in one go instead of behind a prefix. Excess is the mean of nats per token minus that of
BF16. Other columns are shares of right answers; p is of McNemar's test against BF16, question by question. Brackets
hold 95% intervals.
"""

PAIRED = (
    "Intervals: Wilson. Difference from BF16: bootstrap, paired by question. p: McNemar's test. *Cut off*: answers "
    "that reached their limit of tokens; they count as wrong."
)
NOTES = {
    "tail-kl": "The last 256 tokens of a text are read behind the rest, which is cached. A server tells the log "
    "probabilities of its most likely tokens only, so KL is a lower bound, tight where the tokens told hold nearly all "
    "probability (column *told*). Intervals: bootstrap over texts. p: sign-flip test of the excess, paired by text.",
    "effects": "The tails of some of these texts are read twice: behind their cached prefix, and cold, as a prompt "
    "that the server has not seen. Cold, tokens of one prefill chunk (--chunked-prefill-size) read each other as they "
    "were computed and earlier chunks from the cache. Of exact caches both effects are rounding.",
    "retrieval": "A seven-digit number hidden in a cached document, alone (needle) or among three others (multi-key); "
    "exact match of the answer's beginning. Intervals: Wilson. Difference from BF16: bootstrap, paired by question. p: "
    "McNemar's test against BF16, question by question.",
    "recall": "A module of Python source is cached, one of its functions is to be repeated: right from a similarity of "
    "more than .95 on (difflib). " + PAIRED,
    "tasks": "Many questions of a file stand in one cached prompt, then one is asked for by its number, which is in "
    "neither the first 64 nor the last 512 tokens: int2 servers read it in few bits. " + PAIRED,
    "session": "A conversation grows on its cached beginning, with the model's own answers in it. *Cut off*: an answer "
    "that reached its token limit. *Loops*: it ends in one n-gram three times over. *Prefix reused*: of the tokens "
    "that a server had seen, those it did not compute again; int2 computes its recent window anew. Turns depend on "
    "each other, so intervals (Wilson) are too narrow.",
    "json": "A record by JSON schema about a long cached document. A grammar keeps JSON valid unless it is cut off "
    "(*complete*: it ended by itself), so look at whether the recalled number is right.",
}
"""Measure -> how to read its section."""
