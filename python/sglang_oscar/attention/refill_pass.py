"""The forward pass that computes lost sink blocks again, before the batch that reads them.

An extend over the first tokens of each prefix, from position 0: its keys and values go to the sink blocks, its history
rows to the dummy page, and nothing to any ring. It costs about what a decode step does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch

from sglang_oscar.attach import releases
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.memory.owned import STATE
from sglang_oscar.memory.saver import restore
from sglang_oscar.memory.sink_refill import Refill
from sglang_oscar.requests import nan

logger = logging.getLogger(__name__)


def around_model_forward(original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Fill the sink blocks that the batch lacks, then run it; keep windows beside the states that it kept, and note
    what came out."""
    cache = cache_of(self.token_to_kv_pool)
    if cache is not None and cache.flushed:  # no request of this rank runs, those of others do
        restore(cache, self.token_to_kv_pool)
    if cache is not None and (refills := cache.refills.take()):
        adapters = getattr(self, "lora_manager", None)  # whose weights are here: those of the batch
        most = tokens_at_once(releases.resolved(self.server_args))
        # All go to seat 0, and so to one state of linear layers, where there are any: one at a time, from none.
        states = cache.holdings.get(STATE)
        for part in parts_of(refills, most, self.req_to_token_pool.size if states is None else 1):
            for group in states.units.groups if states is not None else ():
                group[:, 0].zero_()
            batch = refill_batch(cache, part, forward_batch)
            releases.plan_writes(self, batch)
            if adapters is not None:
                adapters.prepare_lora_batch(batch)
            # Beside linear layers ours is a part of SGLang's.
            ours = getattr(self.attn_backend, "full_attn_backend", self.attn_backend)
            with ours.refilling(part):
                original(self, batch)
            if forward_batch.input_ids.is_cuda and any(refill.images for refill in part):
                # SGLang moves pixels to the host behind a pass, and the batch may be about to read them there.
                torch.cuda.current_stream().synchronize()
        if adapters is not None:
            adapters.prepare_lora_batch(forward_batch)
        logger.info(
            "int2 sink refill: %d blocks computed again (%d since the start)", len(refills), cache.refills.total
        )
    result = original(self, forward_batch, *args, **kwargs)
    if cache is not None:
        if cache.kept is not None:
            cache.kept.keep_decoded(forward_batch)
        nan.note(cache, forward_batch, result)
    return result


def tokens_at_once(server_args: Any) -> int:
    """Tokens that a forward pass of this server may hold: what its memory was planned for."""
    chunked: int = server_args.chunked_prefill_size
    return chunked if chunked > 0 else int(server_args.max_prefill_tokens)


def parts_of(refills: list[Refill], tokens: int, requests: int) -> Iterator[list[Refill]]:
    """Cut refills into passes of at most ``tokens`` tokens, those of their images included, one block at least, and of
    at most ``requests`` blocks: SGLang has buffers for as many requests as may run.
    """
    part: list[Refill] = []
    filled = 0
    for refill in refills:
        if part and (len(part) == requests or filled + refill.tokens > tokens):
            yield part
            part, filled = [], 0
        part.append(refill)
        filled += refill.tokens
    if part:
        yield part


def refill_batch(cache: Int2Cache, refills: list[Refill], beside: Any) -> Any:
    """SGLang's batch of a refill pass. Images of a sink come with it, and are embedded as in any other prompt.

    Args:
        cache: whose blocks are filled.
        refills: what to compute.
        beside: the batch that is about to run, for devices and dtypes.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    count, device = len(refills), beside.input_ids.device
    lengths = [len(refill.token_ids) for refill in refills]
    tokens = sum(lengths)
    ids = torch.tensor([token for refill in refills for token in refill.token_ids], dtype=beside.input_ids.dtype)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device, non_blocking=True)
    lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(lengths[:-1])], dtype=torch.int32)
    on_device = lens.to(device, non_blocking=True)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=count,
        input_ids=ids.to(device, non_blocking=True),
        # Seat 0 and page 0 are dummies; a page holds the whole sink, so no two tokens of a block share a slot.
        req_pool_indices=torch.zeros(count, dtype=beside.req_pool_indices.dtype, device=device),
        seq_lens=on_device.to(beside.seq_lens.dtype),
        out_cache_loc=positions.to(beside.out_cache_loc.dtype),
        seq_lens_sum=tokens,
        orig_seq_lens=on_device,
        seq_lens_cpu=lens.long(),
        spec_algorithm=beside.spec_algorithm,
        is_extend_in_batch=beside.is_extend_in_batch,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        lora_ids=[refill.adapter for refill in refills],
        mm_inputs=[refill.images and refill.images.inputs for refill in refills],
        positions=positions,
        extend_num_tokens=tokens,
        extend_seq_lens=on_device,
        extend_prefix_lens=torch.zeros_like(on_device),
        extend_start_loc=starts.to(device, non_blocking=True),
        extend_prefix_lens_cpu=[0] * count,
        extend_seq_lens_cpu=lengths,
        extend_logprob_start_lens_cpu=lengths,
    )
    if beside.mrope_positions is not None:
        seen = [None if refill.images is None else refill.images.positions for refill in refills]
        coordinates = [
            torch.arange(length).expand(3, -1) if of_images is None else of_images
            for of_images, length in zip(seen, lengths, strict=True)
        ]
        batch.mrope_positions = torch.cat(coordinates, dim=1).to(device, non_blocking=True)
    count_on_device, count_on_host = releases.real_token_counts(beside)
    if getattr(beside, count_on_device) is not None:
        setattr(batch, count_on_device, torch.full_like(getattr(beside, count_on_device), tokens))
    setattr(batch, count_on_host, tokens)
    if beside.global_num_tokens_cpu is not None:  # ranks exchange their token counts: all of them refill alike
        ranks = len(beside.global_num_tokens_cpu)
        batch.global_num_tokens_cpu = [tokens] * ranks
        batch.global_num_tokens_gpu = torch.full_like(beside.global_num_tokens_gpu, tokens)
        batch.global_num_tokens_for_logprob_cpu = [count] * ranks
        batch.global_num_tokens_for_logprob_gpu = torch.full_like(beside.global_num_tokens_for_logprob_gpu, count)
    return batch
