"""What the servers of all releases are asked, one request at a time, and what they answer.

    python test/support/release_answers.py

writes the answers of the installed release to test/data/release_answers.json.gz. Nothing of them depends on the
release: rows, windows, prefix hits and chunks are the same tokens in the same order.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import golden
from support.compare import LOGPROBS
from support.reference import MODEL, question, token_ids
from support.servers import STRICT, Server, serve

FILE = golden.DATA / "release_answers.json.gz"
LENGTHS = (90, 300, 700, 1100)
TOKENS = 8
RECENT = 64
LONG = 90
"""Tokens of the longest answer: more than the recent window, so that generated tokens are read in 2 bits."""
ARGS = (*golden.ARGS, "--chunked-prefill-size", "512")
"""Chunks are cut alike in all releases, whose defaults differ."""
ENV = golden.ROTATIONS | STRICT | {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
ENV |= {"SGLANG_MIXED_KV_RECENT_TOKENS": str(RECENT), "SGLANG_PLUGINS": ""}
"""Retraction is forced where two requests run, never for one. Plugins are all that the environment has."""


def ask(server: Server) -> list[dict[str, Any]]:
    """Answers to 17 requests: misses, prefix hits, continuations of answers, and prefixes that others may not hit."""
    server.flush()
    answers: list[dict[str, Any]] = []

    def add(ids: list[int], tokens: int = TOKENS, **extra: Any) -> list[int]:
        answers.append(server.generate(ids, tokens, **LOGPROBS, **extra))
        generated: list[int] = answers[-1]["output_ids"]
        return ids + generated

    for length in LENGTHS:
        text, facts = golden.document(length, 200)
        first, second, third = (token_ids(question(word)) for word in sorted(facts))
        ids = token_ids(text)
        told = add(ids + first)
        add(ids + second)
        add(told + token_ids("\n") + third)
    text, facts = golden.document(700, 200)
    ids = token_ids(text + question(min(facts)))
    add(ids, extra_key="other")
    add(ids, extra_key="other")
    told = add(ids, LONG)
    add(told + token_ids("\n" + question(max(facts))))
    add(told + token_ids("\n" + question(max(facts))))
    return golden.condensed(answers)


def load() -> list[dict[str, Any]]:
    """The kept answers."""
    kept: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
    return kept


def main() -> None:
    """Write the answers of the installed release."""
    with tempfile.TemporaryDirectory() as folder:
        with serve(MODEL, Path(folder) / "log", *ARGS, env=ENV) as server:
            answers = ask(server)
            assert answers == ask(server), "the same server answers otherwise when asked again"
    FILE.write_bytes(gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), mtime=0))
    print(f"{FILE}: {len(answers)} answers")


if __name__ == "__main__":
    main()
