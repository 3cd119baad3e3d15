"""What int2 mode serves of speculative decoding, by server arguments.

SGLang names an algorithm by a string. Those that a plugin registers count as what they say they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oscar_kernels.cache import Windows
from oscar_kernels.visible import MOST_TOKENS
from sglang_oscar.attach.releases import argument
from sglang_oscar.names import BACKEND

RING_STEP = 8
"""Ring sizes that recent window and new tokens are rounded up to, tokens."""


def algorithm(args: Any) -> str | None:
    """The name of the algorithm in capitals; None where the server does not speculate."""
    name: str | None = args.speculative_algorithm
    return None if name is None else name.upper()


def drafts_without_model(args: Any) -> bool:
    """Whether drafts come from the host, as those of NGRAM do, and are verified as a tree."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    name = algorithm(args)
    if name is None:
        return False
    try:
        return bool(SpeculativeAlgorithm.from_string(name).is_ngram())
    except ValueError:  # an alias, or a name that SGLang does not know
        return False


def new_tokens(args: Any) -> int:
    """Tokens of a request that a step verifies at once, the last accepted one included; 0 without speculation.

    Args:
        args: server arguments as SGLang resolved them.
    """
    return int(args.speculative_num_draft_tokens) if algorithm(args) is not None else 0


def too_many_tokens(args: Any) -> bool:
    """Whether more tokens are verified at once than a word of the mask has bits. False while SGLang has not decided."""
    return algorithm(args) is not None and (args.speculative_num_draft_tokens or 0) > MOST_TOKENS


def plan_stream(args: Any) -> bool:
    """Whether SGLang prepares a step on a stream of its own, which would overwrite tables that are still read."""
    from sglang.srt.environ import envs

    flag = getattr(envs, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", None)
    return algorithm(args) is not None and flag is not None and bool(flag.get())


def adapts(args: Any) -> bool:
    """Whether the number of tokens changes while the server runs."""
    return algorithm(args) is not None and bool(argument(args, "speculative_adaptive", False))


def with_room(windows: Windows, tokens: int) -> Windows:
    """Windows whose ring holds ``tokens`` new tokens beside the recent window, of which some may be rejected.

    A rejected token stays in the ring until the next step overwrites it, so nothing that is read may have been in its
    place: ``recent + tokens`` rows do.

    >>> with_room(Windows(sink=64, recent=256, ring=256), 4).ring
    264
    >>> with_room(Windows(sink=64, recent=256, ring=256), 0).ring
    256
    """
    if tokens == 0:
        return windows
    ring = -(-(windows.recent + tokens) // RING_STEP) * RING_STEP
    return Windows(sink=windows.sink, recent=windows.recent, ring=ring, max_splits=windows.max_splits)


def around_handle_ngram(original: Callable[[Any], None], server_args: Any) -> None:
    """Let drafts be trees: SGLang knows one attention backend by name that reads pages and obeys a mask of the tree."""
    from sglang_oscar.names import is_int2

    if not is_int2(server_args) or server_args.attention_backend != BACKEND:
        return original(server_args)
    server_args.attention_backend = "flashinfer"
    try:
        original(server_args)
    finally:
        server_args.attention_backend = BACKEND


def _named(*names: str) -> Callable[[Any], bool]:
    return lambda args: algorithm(args) in names


REFUSED: list[tuple[Callable[[Any], bool], str]] = [
    (
        _named("EAGLE", "EAGLE3", "NEXTN"),
        "a draft model with a cache beside its own; drop --speculative-algorithm, or set it to NGRAM",
    ),
    (
        _named("STANDALONE"),
        "a whole model's drafts, whose 16-bit cache would take what 2 bits save; drop --speculative-algorithm, or set "
        "it to NGRAM",
    ),
    (
        _named("FROZEN_KV_MTP"),
        "drafts that read the cache of the model; drop --speculative-algorithm, or set it to NGRAM",
    ),
    (
        lambda args: algorithm(args) is not None and not drafts_without_model(args),
        "this way of drafting; drop --speculative-algorithm, or set it to NGRAM",
    ),
    (
        # A step of verification is no call of the operator that compiled steps are made around.
        lambda args: algorithm(args) is not None and args.enable_torch_compile,
        "speculative decoding inside torch.compile; drop --enable-torch-compile, or --speculative-algorithm",
    ),
    (
        too_many_tokens,
        f"more than {MOST_TOKENS} tokens in a step of verification; set --speculative-num-draft-tokens {MOST_TOKENS}",
    ),
    (adapts, "a changing number of draft tokens; drop --speculative-adaptive"),
    (plan_stream, "steps that are prepared on a stream of their own; unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
]
"""What is refused, in the order in which it is asked; see :mod:`sglang_oscar.attach.refusals`."""
