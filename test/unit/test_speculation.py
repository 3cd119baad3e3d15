"""What speculative decoding adds on the host: room in the ring, masks, moves of accepted tokens, refusals."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_kernels.cache import Windows
from oscar_kernels.format import LayerFormat, SideFormat
from oscar_kernels.visible import causal_words, words_of
from sglang_oscar.memory.geometry import Geometry
from sglang_oscar.memory.side_buffers import SideBuffers
from sglang_oscar.speculation import arguments, commit, verification
from sglang_oscar.speculation.verification import visible_words

HEADS, D = 2, 64


def ring_survives(windows: Windows, tokens: int, seed: int, steps: int = 60) -> bool:
    """Whether every step reads from the ring what it should, with random numbers of accepted tokens.

    A model of the ring: tokens of a step are written behind the accepted ones and read together with the recent window
    before them; then some of them are accepted.
    """
    rng, ring, length = random.Random(seed), [-1] * windows.ring, 0
    for _ in range(steps):
        for index in range(tokens):
            ring[(length + index) % windows.ring] = length + index
        wanted = range(max(length - windows.recent, 0), length + tokens)
        if any(ring[position % windows.ring] != position for position in wanted):
            return False
        length += rng.randrange(1, tokens + 1)
        for index in range(tokens):  # what was rejected is another token by the time its position is read
            if ring[(length + index) % windows.ring] >= length:
                ring[(length + index) % windows.ring] = -2
    return True


@given(st.integers(1, 20), st.integers(0, 40), st.integers(0, 99))
def test_the_ring_has_room(tokens: int, recent: int, seed: int) -> None:
    assert ring_survives(arguments.with_room(Windows(16, recent, recent), tokens), tokens, seed)
    assert ring_survives(Windows(16, recent, recent + tokens), tokens, seed)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_a_row_less_is_too_few(tokens: int) -> None:
    assert not all(ring_survives(Windows(16, 24, 24 + tokens - 1), tokens, seed) for seed in range(20))


def made_cache(windows: Windows, rows: int = 4, blocks: int = 5) -> tuple[Any, SideBuffers]:
    """What a move needs of a cache, its ring numbered and its sinks zero."""
    formats = {layer: LayerFormat(HEADS, D, SideFormat(64), SideFormat(64)) for layer in range(2)}
    buffers = SideBuffers(Geometry(formats, windows, torch.bfloat16), rows, blocks, "cpu")
    table = torch.tensor([0, 3, 1, 4], dtype=torch.int32)
    plan = SimpleNamespace(geometry=SimpleNamespace(windows=windows))
    return SimpleNamespace(plan=plan, rows=SimpleNamespace(sink_block=table), side=buffers), buffers


def numbered(buffers: SideBuffers, rows: int, ring: int) -> torch.Tensor:
    """The ring as [layers * 2, rows, ring], each entry a number of its own, written to all channels."""
    numbers = torch.arange(4 * rows * ring).view(4, rows, ring) % 251
    view = buffers.ring.view(4, rows, ring, HEADS * D)
    view.copy_(numbers[..., None].expand_as(view))
    return numbers


def test_accepted_tokens_move_in_ring_and_sink() -> None:
    """Paths through siblings, one across the end of the sink, one that wraps around."""
    windows, tokens = Windows(16, 24, 32), 8
    cache, buffers = made_cache(windows)
    before = numbered(buffers, 4, 32)
    rows, lens = torch.tensor([2, 1, 3]), torch.tensor([200, 14, 29])
    accepted = torch.tensor([[0, 2, 5, 7], [8, 11, 14, -1], [16, 20, -1, -1]])
    commit.move_accepted(cache, rows, lens, accepted, tokens)
    after = buffers.ring.view(4, 4, 32, HEADS * D)[..., 0].long()
    expected, sinks = before.clone(), torch.zeros(4, 5, 16, dtype=torch.long)
    for request, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        block = int(cache.rows.sink_block[row])
        for place, node in enumerate(accepted[request].tolist()):
            own = node - request * tokens if node >= 0 else place
            value = before[:, row, (length + own) % 32]
            expected[:, row, (length + place) % 32] = value
            if length + place < 16:
                sinks[:, block, length + place] = value
    assert torch.equal(after, expected)
    assert torch.equal(buffers.sink.view(4, 5, 16, HEADS * D)[..., 0].long()[:, 1:], sinks[:, 1:])


def test_no_sink_to_move_to() -> None:
    cache, buffers = made_cache(Windows(0, 24, 32))
    numbered(buffers, 4, 32)
    commit.move_accepted(cache, torch.tensor([1]), torch.tensor([3]), torch.tensor([[0, 5]]), 8)
    assert buffers.sink.numel() == 0


def test_masks_of_either_form_give_the_same_words() -> None:
    """New tokens alone, or behind every token of the request, as for attention over all of them."""
    lens, tokens = torch.tensor([5, 1, 9]), 4
    seen = torch.rand(3, tokens, tokens, generator=torch.Generator().manual_seed(1)) < 0.5
    full = [
        torch.cat([torch.ones(tokens, int(n), dtype=torch.bool), own], 1) for n, own in zip(lens, seen, strict=True)
    ]
    whole = SimpleNamespace(custom_mask=torch.cat([one.flatten() for one in full]))
    assert torch.equal(visible_words(SimpleNamespace(custom_mask=seen.flatten()), lens, tokens), words_of(seen))
    assert torch.equal(verification._of_whole_rows(whole.custom_mask, lens, tokens), words_of(seen))
    padded = torch.cat([lens, torch.ones(5, dtype=lens.dtype)])
    assert torch.equal(verification._of_whole_rows(whole.custom_mask, padded, tokens)[:3], words_of(seen))
    chain = visible_words(SimpleNamespace(custom_mask=None), lens, tokens)
    assert torch.equal(chain, causal_words(tokens, "cpu").expand(3, tokens))


def test_without_speculation_windows_are_what_they_were() -> None:
    windows = Windows(64, 256, 256)
    assert arguments.with_room(windows, 0) is windows


def test_ngram_drafts_may_be_trees() -> None:
    """SGLang sees a backend that it lets have trees, and only while it looks."""
    seen = []
    args = SimpleNamespace(kv_cache_dtype="int2", attention_backend="oscar")
    arguments.around_handle_ngram(lambda record: seen.append(record.attention_backend), args)
    assert (seen, args.attention_backend) == (["flashinfer"], "oscar")
    other = SimpleNamespace(kv_cache_dtype="auto", attention_backend="triton")
    arguments.around_handle_ngram(lambda record: seen.append(record.attention_backend), other)
    assert seen == ["flashinfer", "triton"]
