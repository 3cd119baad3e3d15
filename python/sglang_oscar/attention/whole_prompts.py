"""Which tokens of a batch are whole prompts: a fit rebuilds causal attention, so what is recorded begins at 0."""

from __future__ import annotations

from typing import Any

import torch


def whole_prompts(forward_batch: Any) -> tuple[list[int], torch.Tensor | None]:
    """Lengths of the chunks that begin at position 0, health checks aside, and the places of their tokens in the batch,
    int64 on the CPU; None where there are none.

    Args:
        forward_batch: SGLang's, of chunks.
    """
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    spans, begin = [], 0
    prefixes, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    for rid, prefix, length in zip(forward_batch.rids, prefixes, lengths, strict=True):
        if prefix == 0 and not rid.startswith(HEALTH_CHECK_RID_PREFIX):
            spans.append((begin, begin + length))
        begin += length
    chosen = torch.cat([torch.arange(*span) for span in spans]) if spans else None
    return [stop - start for start, stop in spans], chosen
