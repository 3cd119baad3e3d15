"""From a server's request tables to the tables of one batch that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.cache import BatchTables, StoreSlots, Windows


@dataclass(frozen=True)
class Requests:
    """The requests of a step in the server's tables.

    Shapes: rows int64 [batch], rows of the request pool; kv_lens int32 or int64 [batch], tokens of each request, in
    decode with the new one, in verification without the new ones; req_to_token int32 [pool rows, max_len], the history
    slot of every position; ring_start and sink_block int32 [pool rows], see
    :class:`oscar_kernels.cache.BatchTables`.
    """

    rows: torch.Tensor
    kv_lens: torch.Tensor
    req_to_token: torch.Tensor
    ring_start: torch.Tensor
    sink_block: torch.Tensor


def page_numbers(req_to_token: torch.Tensor, rows: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    """Page tables of the requests in ``rows``: int32 [batch, pages that hold ``longest`` tokens]."""
    return req_to_token[:, : max(longest, 1) : page_size].index_select(0, rows).floor_divide_(page_size)


def window_slots(
    positions: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, windows: Windows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ring and sink slots of tokens at ``positions`` of requests in ``rows`` with sink ``blocks``.

    All int64 [tokens]; -1 where a token is not in that window.
    """
    nowhere = torch.full_like(positions, -1)
    ring = rows * windows.ring + positions % windows.ring if windows.ring else nowhere
    sink = torch.where(positions < windows.sink, blocks * windows.sink + positions, -1) if windows.sink else nowhere
    return ring, sink


def fill_decode_tables(
    requests: Requests, windows: Windows, longest: int, tables: BatchTables, slots: StoreSlots, drafts: int = 0
) -> None:
    """Write the tables of a step of decode or verification, and the window slots of its new tokens, in place.

    ``slots.row`` is left alone, and so are entries of the page table past a request's last page.

    Args:
        requests: of the step.
        windows: sizes of the windows.
        longest: upper bound of the lengths.
        tables: written; the page table has room for ``longest`` tokens.
        slots: ring and sink are written, request after request.
        drafts: new tokens of each request, which its length does not count; 0 in decode, where the one new token is the
            last of that length.
    """
    rows, kv_lens = requests.rows, requests.kv_lens
    pages = page_numbers(requests.req_to_token, rows, longest, tables.page_size)
    in_use = torch.arange(pages.shape[1], device=pages.device) * tables.page_size < kv_lens[:, None]
    written = tables.page_table[:, : pages.shape[1]]
    written.copy_(torch.where(in_use, pages, written))
    tables.kv_lens.copy_(kv_lens)
    tables.ring_row.copy_(rows)
    tables.ring_start.copy_(requests.ring_start[rows])
    blocks = requests.sink_block[rows]
    tables.sink_block.copy_(blocks)
    first = kv_lens.long() if drafts else kv_lens.long() - 1
    positions = (first[:, None] + torch.arange(max(drafts, 1), device=rows.device)).flatten()
    request = torch.arange(len(rows), device=rows.device).repeat_interleave(max(drafts, 1))
    ring, sink = window_slots(positions, rows[request], blocks.long()[request], windows)
    slots.ring.copy_(ring)
    slots.sink.copy_(sink)
