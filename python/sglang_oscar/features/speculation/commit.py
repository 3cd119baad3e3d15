"""What happens to the windows of accepted tokens: they move to where their positions are.

New tokens of a step lie in the ring one behind the other, whatever place in the tree they have. Once a path is
accepted, SGLang moves its rows in the history pool to the front; what is in the ring, and below the sink's end in the
sink block, has to follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.units import Units


def around_move_accept_tokens(
    original: Callable[..., Any],
    batch: Any,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    token_to_kv_pool_allocator: Any,
) -> Any:
    """Move rows, then windows, on the stream of the forward pass; note whose logits count."""
    result = original(batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator)
    cache = cache_of(token_to_kv_pool_allocator.get_kvcache())
    if cache is not None:
        tokens = len(batch.out_cache_loc) // len(batch.seq_lens)
        if cache.logits is not None:
            cache.logits.accept(accept_index)
        move_accepted(cache, batch.req_pool_indices.long(), batch.seq_lens.long(), accept_index.long(), tokens)
        if cache.kept is not None:
            cache.kept.keep_moved()
    return result


def move_accepted(
    cache: Int2Cache, seats: torch.Tensor, seq_lens: torch.Tensor, accepted: torch.Tensor, tokens: int
) -> None:
    """Move what the ring holds of accepted tokens to their positions, and to the sink block where it belongs there.

    Args:
        cache: whose window buffers are written.
        seats: int64 [batch], of the requests.
        seq_lens: int64 [batch], tokens before the step's new ones.
        accepted: int64 [batch, path], index of each accepted token among all new tokens of the batch; -1 behind the
            last one.
        tokens: new tokens of a request.
    """
    windows, device = cache.plan.geometry.windows, seats.device
    batch, path = accepted.shape
    place = torch.arange(path, device=device).expand(batch, path)
    own = accepted - torch.arange(batch, device=device)[:, None] * tokens
    # What is not accepted stays where it is, so that shapes do not depend on how much is.
    own = torch.where(accepted >= 0, own, place)
    first = seats[:, None] * windows.ring
    source, position = first + (seq_lens[:, None] + own) % windows.ring, seq_lens[:, None] + place
    target = first + position % windows.ring
    # A token whose index lies behind the sink and whose position does not is in the ring, not in the sink store.
    block = cache.seats.sink_block[seats].long()[:, None]
    sink = torch.where(position < windows.sink, block * windows.sink + position, 0)
    # A unit is a token here. All are read before any is written.
    buffers = cache.window_buffers
    rings, sinks = (Units([buffer.flatten(1, 2) for buffer in of]) for of in (buffers.rings, buffers.sinks))
    moved = rings.read(source.flatten())
    rings.write(target.flatten(), moved)
    if windows.sink:
        sinks.write(sink.flatten(), moved)
