"""Which requests of a forward pass came out as NaN, without waiting for it: one logit of every row goes to the host.

A hidden state that is no number makes every logit of its token one, so one column says it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LogitsColumn:
    """One logit of every row of a forward pass, on its way to the host.

    ``logits`` [rows]; ``tokens`` of a request are rows side by side, more than one in verification. ``accepted`` int64
    [batch, path] are rows of accepted tokens, -1 behind the last one; None for the first ones of a request. ``ready``
    is recorded behind the copies; None on a CPU. ``on_device`` is what ``logits`` are a copy of.
    """

    logits: torch.Tensor
    tokens: int
    accepted: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None
    on_device: torch.Tensor | None = None

    def accept(self, accepted: torch.Tensor) -> None:
        """Note which rows of a verification count, on the stream of the forward pass."""
        self.accepted, self.ready = to_host(accepted)

    def broken(self, lengths: list[int]) -> list[int]:
        """Requests of which a row that counts is NaN.

        Args:
            lengths: accepted tokens of every request of the batch, 1 outside of verification.
        """
        if self.ready is not None:
            self.ready.synchronize()
        nan = self.logits.isnan()
        if not bool(nan.any()):
            return []
        if self.accepted is None:
            counts = torch.arange(self.tokens) < torch.tensor(lengths)[:, None]
            rows = nan[: counts.numel()].view(counts.shape)
        else:
            counts = self.accepted[: len(lengths)] >= 0
            rows = nan[self.accepted[: len(lengths)].clamp(min=0).long()]
        return (counts & rows).any(1).nonzero().flatten().tolist()


def take(logits: torch.Tensor, tokens: int) -> LogitsColumn:
    """Begin to copy one logit of every row to the host, and zero rows of NaN: what samples them may stop the process.

    Args:
        logits: [rows, vocabulary], of a forward pass.
        tokens: rows of a request.
    """
    if not logits.is_cuda:
        column = logits[:, 0].clone()
        logits[column.isnan()] = 0.0
        return LogitsColumn(column, tokens, on_device=column)
    from oscar_kernels.triton.broken_rows import zero_broken_rows_

    return from_device(zero_broken_rows_(logits), tokens)


def from_device(column: torch.Tensor, tokens: int) -> LogitsColumn:
    """A column [rows] that was taken, on its way to the host."""
    copy, ready = to_host(column)
    return LogitsColumn(copy, tokens, ready=ready, on_device=column)


def to_host(x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what says that it has arrived."""
    if not x.is_cuda:
        return x.clone(), None
    copy = x.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return copy, ready
