"""What a prefill server sends of a request besides pages of rows, and what both servers must have in common.

Rows go as SGLang sends any page, those of a draft model behind them. The recent window goes as a component of a
request's state that SGLang has for rings: the last tokens of the prompt at their places in the request's ring, on
either server its own. Sinks are not sent: the decode server computes them again
(:mod:`sglang_oscar.features.disaggregation.waiting`), once for all requests that begin alike.

Both servers have as many tensor-parallel ranks. Between different numbers SGLang sends a share of the kv heads, cut out
of every token's bytes as if a head's lay together, and alike in all layers; of a row the codes of all heads come first,
their scales behind, and layers may differ. Rings it does not send at all then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oscar_kernels.format import any_cut
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.drafts import draft_facts
from sglang_oscar.formats.model_identity import digest
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.owned import STATE, Holding
from sglang_oscar.names import DTYPE


def around_setup_state(
    original: Callable[..., None], kv_args: Any, token_to_kv_pool: Any, *args: Any, **kwargs: Any
) -> None:
    """Add the recent rings to what is sent, and what rows mean to what the servers compare before anything is sent."""
    original(kv_args, token_to_kv_pool, *args, **kwargs)
    cache = cache_of(token_to_kv_pool)
    if cache is None:
        return
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component
    from sglang.srt.runtime_context import get_parallel, get_server_args

    geometry = cache.plan.geometry
    windows = geometry.windows
    if any_cut(geometry.formats.values()) and get_parallel().pp_size > 1:
        raise Int2Error(
            "--disaggregation-mode with --pp-size cannot send layers whose kv heads have codes of their own; set "
            "--pp-size 1, or fit a file for --bits such as k3v2"
        )
    # How long rings are, by the names under which SGLang sends them.
    token_to_kv_pool.unified_swa_ring_size, token_to_kv_pool.unified_swa_window = windows.ring, windows.recent
    kv_args.kv_cache_dtype_str = common_format(cache, get_parallel().attn_tp_size, drafts(get_server_args()))
    for name, of in cache.holdings.items():
        if of.carried and not of.in_pages and (pieces := pieces_of(name, of, windows.ring)):
            append_state_component(
                kv_args,
                StateType.SWA_RING,
                [piece.data_ptr() for piece in pieces],
                [piece.nbytes for piece in pieces],
                [piece[0, 0].nbytes for piece in pieces],
            )


def pieces_of(name: str, of: Holding, ring: int) -> list[torch.Tensor]:
    """The tensors of what goes with a request, [rings, ring, ...] each: keys of all layers, then values. Raises
    Int2Error where they are no rings, which alone SGLang sends."""
    pieces = [piece for side in (0, 1) for group in of.units.groups for piece in group[side::2]]
    if any(piece.shape[1] != ring for piece in pieces):
        raise Int2Error(f"--disaggregation-mode cannot send the {name} of a request; drop it")
    return pieces


def common_format(cache: Int2Cache, ranks: int, drafts: str) -> str:
    """What two servers must agree in so that one can read what the other has stored, as text that names it.

    Args:
        cache: of either server.
        ranks: tensor-parallel ranks that heads are spread over.
        drafts: of either server (:func:`drafts`).
    """
    windows, dtype = cache.plan.geometry.windows, str(cache.plan.geometry.window_dtype).removeprefix("torch.")
    state = cache.holdings.get(STATE)
    return (
        f"{DTYPE} with --tp-size {ranks} on both servers (format {cache.fingerprint[:16]}, sink {windows.sink}, recent "
        f"window {windows.recent} in ring {windows.ring}, {dtype}"
        f"{f', states of {state.units.unit_bytes} bytes' if state else ''}{drafts})"
    )


def drafts(server_args: Any) -> str:
    """Which draft model a server has, by its weights, and what a step verifies; empty without one. Rows of another one
    would be of no use, and nothing would show it but that next to no draft is accepted.

    Args:
        server_args: as the worker has them.

    Raises:
        Int2Error: files of its weights have changed since they were loaded.
    """
    facts = draft_facts(server_args)
    if facts is None:
        return ""
    return f", draft model {digest(facts)[:16]} with {new_tokens(releases.resolved(server_args))} tokens a step"
