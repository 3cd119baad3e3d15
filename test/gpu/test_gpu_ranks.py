"""Several GPUs give one rank's answers, and all ranks agree on sinks and evictions without a word to each other.

More tests of servers on two and four GPUs are those of test_servers.py and test_exact_rows.py whose names end in
``on_2`` and ``on_4``.
"""

from __future__ import annotations

import pytest

from support import golden
from support.fleet import FLEET, Fleet, each
from support.gpu_answers import assert_ranks_agree, compare, compare_many, healthy, right


@each("plain_on_2", "plain_on_4")
def test_ranks_agree_with_each_other_and_with_one(name: str, fleet: Fleet, expected: dict) -> None:
    """The model has two kv heads: on four GPUs, two ranks each hold a copy of one."""
    server, ranks = fleet[name], FLEET[name].ranks
    got = golden.conversations(server, expected["conversations"])
    compare(name, expected["conversations"], got)
    assert any(answer["meta_info"]["cached_tokens"] for answer in got)
    for workers in (1, 64):
        compare_many(f"{name}, {workers} at once", expected, golden.many(server, workers))
    compare_many(f"{name}, again", expected, golden.many(server, workers=8, flush=False))
    healthy(server, ranks)
    # One pass each in conversations and one by one, fewer at once.
    assert_ranks_agree(server.text(), ranks, passes=80)


@pytest.mark.uses("per_head")
@each("per_head_on_2", "per_head_on_4")
def test_transforms_by_kv_head(name: str, fleet: Fleet) -> None:
    """Each rank takes the transforms and centers of its own heads; what one GPU answers is not kept in test/data."""
    wanted = golden.conversations(fleet["per_head"])
    compare(name, wanted, golden.conversations(fleet[name], wanted))
    for one in ("per_head", name):
        score = right(golden.many(fleet[one], workers=64))
        print(f"{one}: {score} of 64 right")
        assert score >= 56
        healthy(fleet[one], FLEET[one].ranks)
