"""From a server's request tables to the tables of one batch that the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oscar_kernels.cache import BatchTables, StoreSlots, Windows


@dataclass(frozen=True)
class Requests:
    """The requests of a decode step in the server's tables.

    Shapes: rows int64 [batch], rows of the request pool; kv_lens int32 or int64 [batch], tokens of each request, the
    new one included; req_to_token int32 [pool rows, max_len], the history slot of every position; ring_start and
    sink_block int32 [pool rows], see :class:`oscar_kernels.cache.BatchTables`.
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
    requests: Requests, windows: Windows, longest: int, tables: BatchTables, slots: StoreSlots
) -> None:
    """Write the tables of a decode step, and the window slots of its new tokens, in place.

    ``slots.row`` is left alone, and so are entries of the page table past a request's last page.

    Args:
        requests: of the step.
        windows: sizes of the windows.
        longest: upper bound of the lengths.
        tables: written; the page table has room for ``longest`` tokens.
        slots: ring and sink are written.
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
    ring, sink = window_slots(kv_lens.long() - 1, rows, blocks.long(), windows)
    slots.ring.copy_(ring)
    slots.sink.copy_(sink)
