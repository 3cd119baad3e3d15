"""What the tokens of images in a request's sink depend on beside their ids: the images, and where they stand.

SGLang puts numbers made from an image's hash in place of the ids of its tokens, before a request is queued. Ids alone
therefore tell most images apart. A hash of pixels does not tell a wide white image from a tall one: these differ in the
positions of their tokens, where these have three coordinates. Where they count on, lines of an image may end at other
places, which may lie behind the sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SinkImages:
    """Images, or videos, of which a sink holds tokens.

    ``inputs`` are all multimodal inputs of the request, SGLang's MultimodalInputs; ``positions`` int64 [3, sink tokens]
    are those that the rotary embedding turns the sink's tokens to, on the CPU, None where these count on; ``lines`` are
    the first and last places of consecutive tokens of the images that begin in the sink; ``tokens`` is how many tokens
    all of the request's images have, which a vision tower may compute at once.
    """

    inputs: Any
    positions: torch.Tensor | None
    lines: tuple[tuple[int, int], ...]
    tokens: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells the sink from others with the same token ids."""
        return self.lines if self.positions is None else tuple(self.positions.flatten().tolist())


def sink_images(req: Any, sink: int) -> SinkImages | None:
    """The images that a request's first ``sink`` tokens are made of; None where these are text.

    Text in front of the first image is what it is without one, so it may share a sink with requests without images.

    Args:
        req: SGLang's Req.
        sink: tokens.
    """
    inputs = getattr(req, "multimodal_inputs", None)
    if inputs is None:
        return None
    images = [list(item.offsets or ()) for item in inputs.mm_items]
    lines = tuple(line for image in images if any(start < sink for start, _ in image) for line in image)
    if not lines:
        return None
    tokens = sum(end - start + 1 for image in images for start, end in image)
    return SinkImages(inputs, _positions(inputs, sink), lines, tokens)


def _positions(inputs: Any, sink: int) -> torch.Tensor | None:
    if inputs.mrope_positions is None:
        return None
    positions: torch.Tensor = inputs.mrope_positions[:, :sink].cpu().long()
    if (missing := sink - positions.shape[1]) > 0:
        # The prompt ends within the sink. Generated tokens follow the largest coordinate of the prompt.
        first = int(inputs.mrope_position_delta.flatten()[0]) + positions.shape[1]
        tail = torch.arange(first, first + missing).expand(3, -1)
        positions = torch.cat([positions, tail], dim=1)
    return positions
