"""What the host pools of a hierarchical cache would hold, sized as SGLang sizes them."""

from __future__ import annotations

from sglang_oscar.features.hybrids.state_slots import StateSlots
from sglang_oscar.features.sliding_windows.window_pool import WindowPool
from sglang_oscar.features.speculation.draft_model import DraftCache
from sglang_oscar.features.tiers.pages import PageLayout, host_line, host_tokens
from sglang_oscar.formats.geometry import GIB
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.names import DEFAULT_PAGE_SIZE


def host_lines(
    plan: MemoryPlan, tokens: int, gigabytes: float, ratio: float, page_size: int = DEFAULT_PAGE_SIZE
) -> list[str]:
    """A line of each pool: rows, layers with a window, states, and a draft model's cache. They share --hicache-size by
    their bytes on the device, without the draft model's, which has as many tokens as that of rows.

    Args:
        plan: of the memory of a device.
        tokens: of the history pool there.
        gigabytes: 10^9 bytes (--hicache-size); 0 where the ratio decides.
        ratio: of what the host has to what the device has (--hicache-ratio).
        page_size: tokens of a page.
    """
    windows, states, drafts = plan.part(WindowPool), plan.part(StateSlots), plan.part(DraftCache)
    pools = [(PageLayout.of_formats(plan.geometry.formats, page_size), tokens)]
    if windows is not None:
        pools.append((PageLayout(page_size, windows.row_bytes), windows.tokens(plan.requests, tokens)))
    # With the page that takes padding.
    device = [(held + page_size) * sum(map(sum, layout.row_bytes)) for layout, held in pools]
    all_states = 0 if states is None else (states.slots + 1) * states.state_bytes + states.verified_bytes
    shares = [gigabytes * own / (sum(device) + all_states) for own in (*device, all_states)]
    hosts = [host_tokens(layout, share, ratio, held) for (layout, held), share in zip(pools, shares, strict=False)]
    lines = [host_line(held, layout) for (layout, _), held in zip(pools, hosts, strict=True)]
    if states is not None:
        slot = states.state_bytes + states.copy_bytes
        slots = int(shares[-1] * 1e9 // slot if gigabytes else states.slots * ratio) + 1
        lines.append(f"states on the host: {slots} slots x {slot} bytes = {slots * slot / GIB:.3f} GiB")
    if drafts is not None:
        row = PageLayout(page_size, ((drafts.cell_bytes,), (0,))).token_bytes
        size = hosts[0] * row / GIB
        lines.append(f"draft model's cache on the host: {hosts[0]} tokens x {row} bytes = {size:.3f} GiB")
    return lines
