"""What a server takes of a GPU beside weights is what its account says: nothing grows while it serves."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor

from support.fleet import FLEET, Fleet, each
from support.models import VOCABULARY
from support.servers import Server

MIB = 1 << 20
SLACK = 96 * MIB
"""What rounding of allocations and activations of so small a model may take. Partial results of a verification by the
Triton kernel, at the numbers of ``account_triton``, take twice as much."""
LOGITS, HIDDEN = 6 * VOCABULARY, 32 * 192 + 12 * 512
"""Bytes that SGLang itself takes for a token of a step: logits in 16 and in 32 bits; hidden states and what the MLP of
the shipped model works on."""


def memory(server: Server) -> dict[str, dict[str, int]]:
    """By moment, what PyTorch has allocated and reserved, and the most that it had, in bytes."""
    found = re.findall(r"gpu_checks: memory (\w+) allocated (\d+) reserved (\d+) most (\d+)", server.text())
    return {name: dict(zip(("allocated", "reserved", "most"), map(int, rest), strict=True)) for name, *rest in found}


@each("account", "account_triton")
def test_account(name: str, fleet: Fleet) -> None:
    server = fleet[name]
    rng, running, args = random.Random(1), FLEET[name].running, FLEET[name].args
    drafts = int(args[args.index("--speculative-num-draft-tokens") + 1])
    prompts = [[rng.randrange(6, VOCABULARY) for _ in range(100)] for _ in range(running)]
    with ThreadPoolExecutor(running) as pool:
        list(pool.map(lambda ids: server.generate(ids, 16), prompts))
    told = memory(server)
    planned = int(re.findall(r"gpu_checks: account (\d+)", server.text())[-1])
    # Pool, windows, workspaces and matrices; then graphs, which have none of their own but what SGLang works on.
    assert told["ready"]["allocated"] - told["start"]["allocated"] <= planned + SLACK
    assert told["captured"]["reserved"] - told["ready"]["reserved"] <= running * drafts * (LOGITS + HIDDEN) + SLACK
    assert told["served"]["most"] - told["captured"]["reserved"] <= SLACK
