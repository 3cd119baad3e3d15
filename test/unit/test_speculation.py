"""What speculative decoding adds on the host: room in the ring, masks, moves of accepted tokens, refusals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from oscar_kernels.cache import Windows
from oscar_kernels.visible import causal_words, words_of
from sglang_oscar.attention import verification
from sglang_oscar.attention.backend import OscarAttentionBackend
from sglang_oscar.attention.batch import Batch, DecodeTables
from sglang_oscar.attention.verification import visible_words
from sglang_oscar.features.speculation import arguments, commit
from sglang_oscar.formats.geometry import with_room
from sglang_oscar.memory.window_buffers import WindowBuffers
from support.small_cache import small_cache

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
    assert ring_survives(with_room(Windows(16, recent, recent), tokens), tokens, seed)
    assert ring_survives(Windows(16, recent, recent + tokens), tokens, seed)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_a_row_less_is_too_few(tokens: int) -> None:
    assert not all(ring_survives(Windows(16, 24, 24 + tokens - 1), tokens, seed) for seed in range(20))


def made_cache(windows: Windows) -> tuple[Any, WindowBuffers]:
    cache = small_cache(windows)
    cache.seats.sink_block.copy_(torch.tensor([0, 3, 1, 4]))
    return cache, cache.window_buffers


def numbered(buffers: WindowBuffers, rings: int, ring: int) -> torch.Tensor:
    """The ring as [layers * 2, rings, ring], each entry a number of its own, written to all channels."""
    numbers = torch.arange(4 * rings * ring).view(4, rings, ring) % 251
    view = buffers.rings[0].view(4, rings, ring, HEADS * D)
    view.copy_(numbers[..., None].expand_as(view))
    return numbers


def test_accepted_tokens_move_in_ring_and_sink() -> None:
    """Paths through siblings, one across the end of the sink, one that wraps around."""
    windows, tokens = Windows(16, 24, 32), 8
    cache, buffers = made_cache(windows)
    before = numbered(buffers, 4, 32)
    seats, lens = torch.tensor([2, 1, 3]), torch.tensor([200, 14, 29])
    accepted = torch.tensor([[0, 2, 5, 7], [8, 11, 14, -1], [16, 20, -1, -1]])
    commit.move_accepted(cache, seats, lens, accepted, tokens)
    after = buffers.rings[0].view(4, 4, 32, HEADS * D)[..., 0].long()
    expected, sinks = before.clone(), torch.zeros(4, 5, 16, dtype=torch.long)
    for request, (seat, length) in enumerate(zip(seats.tolist(), lens.tolist(), strict=True)):
        block = int(cache.seats.sink_block[seat])
        for place, node in enumerate(accepted[request].tolist()):
            own = node - request * tokens if node >= 0 else place
            value = before[:, seat, (length + own) % 32]
            expected[:, seat, (length + place) % 32] = value
            if length + place < 16:
                sinks[:, block, length + place] = value
    assert torch.equal(after, expected)
    assert torch.equal(buffers.sinks[0].view(4, 5, 16, HEADS * D)[..., 0].long()[:, 1:], sinks[:, 1:])


def test_no_sink_to_move_to() -> None:
    cache, buffers = made_cache(Windows(0, 24, 32))
    commit.move_accepted(cache, torch.tensor([1]), torch.tensor([3]), torch.tensor([[0, 5]]), 8)
    assert buffers.sinks[0].numel() == 0


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


LONGEST = 4096


def tables_cache() -> Any:
    """What tables of a step need of a cache of four seats, each with its own slots, ring start and sink block."""
    cache = small_cache(Windows(16, 24, 32), page_size=64, longest=LONGEST)
    for seat in range(1, 4):
        cache.seats.assign(seat, ring_start=seat, sink_block=seat + 1)
    return cache


def step(spec_info: Any, lens: Sequence[int] = (200, 9), on_host: bool = False) -> Any:
    """SGLang's batch of a step that verifies two requests of such lengths."""
    mode = SimpleNamespace(is_target_verify=lambda: True, is_idle=lambda: False, is_decode=lambda: False)
    device = torch.tensor(lens)
    return SimpleNamespace(
        forward_mode=mode, batch_size=2, req_pool_indices=torch.tensor([2, 1]), seq_lens=device,
        seq_lens_cpu=device if on_host else None, spec_info=spec_info,
    )  # fmt: skip


def backend_of(cache: Any, tokens: int) -> OscarAttentionBackend:
    """A backend that fills tables of such steps."""
    made: Any = OscarAttentionBackend.__new__(OscarAttentionBackend)
    made.cache, made.req_to_token_pool, made.new_tokens, made._refilled = cache, cache.req_to_token_pool, tokens, None
    made.init_cuda_graph_state(8, 8 * tokens)
    return made


def contents(batch: Batch, lens: list[int]) -> list[Any]:
    """What kernels read of the tables."""
    tables, pages = batch.tables, [table[: -(-n // 64)] for table, n in zip(batch.tables.page_table, lens, strict=True)]
    small = (tables.kv_lens, tables.ring_row, tables.ring_start, tables.sink_block, batch.slots.ring, batch.slots.sink)
    return [one.tolist() for one in (*pages, *small, batch.visible) if one is not None]


def test_a_graph_records_what_an_eager_step_writes() -> None:
    """With and without lengths on the host, and again for another step in the same tables."""
    made, chain = backend_of(tables_cache(), 4), SimpleNamespace(custom_mask=torch.zeros(9, dtype=torch.bool), topk=1)
    for lens in ([200, 9], [64, 300]):
        made.init_forward_metadata(step(chain, lens, on_host=True))
        assert made.batch is not None
        expected = contents(made.batch, lens)
        replayed = step(chain, lens)
        made.init_forward_metadata_out_graph(replayed)
        made.init_forward_metadata_in_graph(replayed)
        assert contents(made.batch, lens) == expected
    assert made.batch is not None
    assert torch.equal(made.batch.visible, causal_words(4, "cpu").expand(2, 4))
    assert made.batch.tables.ring_start.tolist() == [2, 1]


def test_a_step_of_chains_launches_nothing_before_its_graph() -> None:
    """Each operation would be a launch that the GPU waits for."""
    seen: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    made, replayed = backend_of(tables_cache(), 4), step(SimpleNamespace(custom_mask=torch.ones(9), topk=1))
    made.init_forward_metadata_out_graph(replayed)  # the first step has changes of seats to upload
    with Operations():
        made.init_forward_metadata_out_graph(replayed)
    assert not seen


def test_trees_replace_the_words_of_chains_and_chains_those_of_trees() -> None:
    tables, seen = DecodeTables(tables_cache(), 8, drafts=4), torch.rand(2, 4, 4) < 0.5
    tree, chain = step(SimpleNamespace(custom_mask=seen.flatten())), step(SimpleNamespace(custom_mask=None))
    for batch, words in ((chain, causal_words(4, "cpu").expand(2, 4)), (tree, words_of(seen))) * 2:
        assert torch.equal(tables.prepare(batch).visible, words)  # type: ignore[arg-type]


def test_only_masks_of_trees_are_read() -> None:
    """SGLang makes those of chains as small as it can, in no buffer of ours; nor does it send lengths to the host."""
    mask = verification.unread_mask(SimpleNamespace(speculative_algorithm="EAGLE3"), torch.device("cpu"))
    assert (mask.mode.name, mask.is_read, mask.fits(1)) == ("QLEN_ONLY", False, False)
    for name in (None, "NGRAM"):
        assert verification.unread_mask(SimpleNamespace(speculative_algorithm=name), torch.device("cpu")) is None
    assert OscarAttentionBackend.needs_cpu_seq_lens is False


def test_without_speculation_windows_are_what_they_were() -> None:
    windows = Windows(64, 256, 256)
    assert with_room(windows, 0) is windows


def test_ngram_drafts_may_be_trees() -> None:
    """SGLang sees a backend that it lets have trees, and only while it looks."""
    seen = []
    args = SimpleNamespace(kv_cache_dtype="int2", attention_backend="oscar")
    arguments.around_handle_ngram(lambda record: seen.append(record.attention_backend), args)
    assert (seen, args.attention_backend) == (["flashinfer"], "oscar")
    other = SimpleNamespace(kv_cache_dtype="auto", attention_backend="triton")
    arguments.around_handle_ngram(lambda record: seen.append(record.attention_backend), other)
    assert seen == ["flashinfer", "triton"]
