"""What GPU tests ask of a server's answers: agreement with the CPU server's, and that nothing broke on the way.

The CPU server computes in float32 where the GPU has BF16, so log probabilities drift a little and near-ties flip.
"""

from __future__ import annotations

import re
from typing import Any

from support import golden
from support.api import loads
from support.compare import assert_same, first_difference, largest_drift
from support.reference import token_ids
from support.servers import Server

NEAR_TIE = 2.0
DRIFT = 1.3
"""In nats, twice what one rounding to BF16 does. A CPU server with that noise on queries, keys and values (the check
``noise`` of the test plugin) parts from the one without at gaps of up to 1.03 where it is free to choose a word, at the
very tokens at which a GPU parts, and moves log probabilities by up to 0.66 (three seeds): a code that flips moves a
channel by a third of its group's range."""
CERTAIN = 3.0
"""Gap, in nats, between the two best tokens of the CPU server beyond which no rounding explains another choice."""
PASSES = 20
"""Passes over prompts at least whose digests ranks must have in common."""


def compare(name: str, wanted: list[dict[str, Any]], got: list[dict[str, Any]]) -> None:
    """Assert agreement, and print how far it goes."""
    found = enumerate(map(first_difference, wanted, got))
    parted = {number: (part.index, round(part.gap, 3)) for number, part in found if part}
    drift = max(map(largest_drift, wanted, got))
    print(f"{name}: {len(wanted)} answers, largest drift {drift:.3f}, part (token, gap): {parted}")
    assert_same(wanted, got, NEAR_TIE, DRIFT)


def compare_many(name: str, expected: dict[str, list[dict[str, Any]]], got: list[dict[str, Any]]) -> None:
    """The same for ``golden.many``, without the answers that rounding decides."""
    compare(name, golden.stable(expected["many"]), golden.stable(got))


def uncertain(wanted: list[dict[str, Any]], got: list[dict[str, Any]]) -> dict[int, tuple[int, float]]:
    """Answers whose digits differ from digits that the CPU server was certain of: number -> (token, gap)."""
    wrong = {}
    for number, (want, have) in enumerate(zip(wanted, got, strict=True)):
        for token in range(0 if number in golden.UNSTABLE else golden.DIGITS):
            top = want["meta_info"]["output_top_logprobs"][token]
            if top[0][0] - top[1][0] < CERTAIN:
                break
            if want["output_ids"][token] != have["output_ids"][token]:
                wrong[number] = (token, round(top[0][0] - top[1][0], 2))
                break
    return wrong


def right(answers: list[dict[str, Any]]) -> int:
    """How many of ``golden.many``'s questions are answered rightly."""
    asked = golden.prompts(range(8))
    pairs = zip(answers, asked, strict=True)
    return sum(answer["output_ids"][: golden.DIGITS] == token_ids(number) for answer, (_, number) in pairs)


def healthy(server: Server, ranks: int = 1, passes: int = PASSES) -> None:
    """Nothing broke, leaked or is left, and ranks agree over so many passes over prompts at least."""
    server.flush()
    assert loads(server) == (0, 0)
    assert server.alive()
    text = server.text()
    assert "Traceback" not in text
    assert "leak" not in text
    if ranks > 1:
        assert_ranks_agree(text, ranks, passes)


def assert_ranks_agree(text: str, ranks: int, passes: int = PASSES) -> None:
    """All ranks had the same sinks, rows and lengths at every pass over prompts.

    Args:
        text: log of a server with the check ``ranks`` of the test plugin.
        ranks: how many there are.
        passes: over prompts at least; most of them change something.
    """
    # Ranks write to one log: a line may follow another without a break.
    pattern = r"gpu_checks: rank {} ([0-9a-f]{{16}}) ([0-9a-f]{{16}})"
    said = [re.findall(pattern.format(rank), text) for rank in range(ranks)]
    # Ranks run a step apart: the last digests of one may be missing.
    common = min(map(len, said))
    assert common >= passes, f"passes over prompts by rank: {[len(one) for one in said]}"
    for rank in range(1, ranks):
        parted = next((at for at in range(common) if said[rank][at] != said[0][at]), None)
        assert parted is None, f"rank {rank} parts from rank 0 at pass {parted} of {common}"
    assert len({sinks for sinks, _ in said[0]}) > passes // 2
