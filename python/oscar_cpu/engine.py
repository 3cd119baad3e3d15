"""What stock SGLang lacks to run with pages on a machine without a GPU.

The paged allocator and a few index helpers are Triton kernels, which need a GPU. SGLang picks torch versions of the
helpers by the name of the attention backend; in older releases the allocator has none, so its two methods are done in
torch here.
Used with SGLANG_USE_CPU_ENGINE=1 and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.worker import active


def around_support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """The oscar backend uses Triton on a GPU only."""
    from sglang.srt.utils import is_cpu

    return False if backend == "oscar" and is_cpu() else original(backend)


def around_get_last_loc(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """The slot of the last token of each request, -1 where it has none: SGLang's own in torch, on a CPU."""
    if active() is None or req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def around_alloc_extend(
    original: Callable[..., Any],
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Any:
    """Slots for a chunk per request: the rest of its last page, then new pages."""
    if torch.device(self.device).type != "cpu" or releases.allocates_on_cpu(self):
        return original(
            self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
    page_size = self.page_size
    if self.need_sort and extend_num_tokens // page_size + len(prefix_lens) + 1 > len(self.free_pages):
        self.merge_and_sort_free()
    parts, used = [], 0
    for prefix, seq, last in zip(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist(), strict=True):
        in_page = min(seq, -(-prefix // page_size) * page_size) - prefix
        pages = -(-(seq - prefix - in_page) // page_size)
        fresh = self.free_pages[used : used + pages]
        if len(fresh) < pages:
            return None
        slots = (fresh[:, None] * page_size + torch.arange(page_size)).flatten()
        parts += [last + 1 + torch.arange(in_page), slots[: seq - prefix - in_page]]
        used += pages
    self.free_pages = self.free_pages[used:]
    return torch.cat(parts).to(torch.int64)


def around_alloc_decode(
    original: Callable[..., Any], self: Any, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
) -> Any:
    """One slot per request: the next of its page, or the first of a new one."""
    if torch.device(self.device).type != "cpu" or releases.allocates_on_cpu(self):
        return original(self, seq_lens, seq_lens_cpu, last_loc)
    if self.need_sort and len(seq_lens) > len(self.free_pages):
        self.merge_and_sort_free()
    opens_page = seq_lens_cpu % self.page_size == 1
    count = int(opens_page.sum())
    if count > len(self.free_pages):
        return None
    slots = last_loc.to(torch.int64) + 1
    slots[opens_page] = self.free_pages[:count] * self.page_size
    self.free_pages = self.free_pages[count:]
    return slots


def before_cache_controller(self: Any, token_to_kv_pool_allocator: Any, *args: Any, **kwargs: Any) -> None:
    """Streams and events of a hierarchical cache on a CPU: older releases take those of PyTorch's build, CUDA's."""
    if active() is not None and torch.device(token_to_kv_pool_allocator.device).type == "cpu":
        for name in ("managers.cache_controller", "mem_cache.l2_transfer"):
            module: Any = sys.modules.get(f"sglang.srt.{name}")
            if module is not None:
                module.device_module = torch.cpu


def around_create_decode_backend(original: Callable[[Any], Any], self: Any) -> Any:
    """What a draft model's steps attend with: of SGLang's backends for them none is for any CPU."""
    if not _drafts_on_cpu(self):
        return original(self)
    from oscar_cpu.draft_attention import DraftSteps

    return DraftSteps(self.draft_model_runner, self.speculative_num_steps) if self.speculative_num_steps > 1 else None


def around_create_extend_backend(original: Callable[[Any], Any], self: Any) -> Any:
    """None, on a CPU: the draft model extends with the backend that it has."""
    return None if _drafts_on_cpu(self) else original(self)


def _drafts_on_cpu(factory: Any) -> bool:
    return active() is not None and torch.device(factory.draft_model_runner.device).type == "cpu"
