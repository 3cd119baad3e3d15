"""What server arguments mean to more than one room: whether a server speculates, or does half of the work."""

from __future__ import annotations

from typing import Any

from sglang_oscar.attach.releases import argument

DRAFT_MODELS = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms whose drafts come from a small model with a cache of its own; NEXTN is EAGLE with a layer that the model
brings along."""


def algorithm(args: Any) -> str | None:
    """The name of the algorithm of speculative decoding in capitals; None where the server does not speculate."""
    name: str | None = args.speculative_algorithm
    return None if name is None else name.upper()


def drafts_with_model(args: Any) -> bool:
    """Whether drafts come from a model that has a cache of its own."""
    return algorithm(args) in DRAFT_MODELS


def new_tokens(args: Any) -> int:
    """Tokens of a request that a step verifies at once, the last accepted one included; 0 without speculation.

    Args:
        args: server arguments as SGLang resolved them.
    """
    return int(args.speculative_num_draft_tokens) if algorithm(args) is not None else 0


def disaggregated(args: Any) -> bool:
    """Whether a server computes prompts or decodes, but not both, or may be told to."""
    return bool(args.disaggregation_mode != "null" or argument(args, "enable_pd_role_switch", False))


def replicas(args: Any) -> int:
    """Groups of ranks that attend to requests of their own (data-parallel attention); 1 where all attend to all.

    Args:
        args: server arguments, resolved or not: newer releases move the number while they resolve.
    """
    return max(args.dp_size if args.enable_dp_attention else 1, int(argument(args, "attn_dp_size", 1)))
