"""Kept windows: found by tokens, copied in order, brought to who goes on from them; on the host, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_kernels.cache import Windows
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.resuming import feature
from sglang_oscar.features.resuming.resumed import Resumed
from sglang_oscar.features.resuming.store import TAIL, WindowStore
from sglang_oscar.settings import Settings
from support.small_cache import small_cache

RECENT, PAGE, SEATS = 8, 4, 6
PROMPT = list(range(100, 121))
"""21 tokens: five whole pages and one token."""


def request(ids: list[int], seat: int | None = None, **fields: Any) -> Any:
    made = {
        "rid": "r", "origin_input_ids": ids, "output_ids": [], "req_pool_idx": seat, "extra_key": None,
        "input_embeds": None, "positional_embed_overrides": None, "finished": lambda: True,
    }  # fmt: skip
    return SimpleNamespace(**made | fields)


def make(windows: int = 3) -> Resumed:
    cache = small_cache(Windows(0, RECENT, RECENT), SEATS, page_size=PAGE)
    ring = cache.window_buffers.rings[0]
    made = Resumed(cache, [ring.new_zeros(ring.shape[0], windows, *ring.shape[2:])])
    cache.seats.moves = made.move
    return made


def rings(of: Resumed) -> torch.Tensor:
    """A number for each ring."""
    return of.cache.window_buffers.rings[0][0, :, 0, 0, 0]


def compute(of: Resumed, req: Any, number: float) -> None:
    """A batch that computes a whole prompt, whose ring then holds ``number``."""
    of.take(req, req.req_pool_idx, 0)
    of.prompt(req, len(req.origin_input_ids))
    of.cache.seats.upload()
    of.cache.window_buffers.rings[0][:, req.req_pool_idx] = number


def test_a_prompt_again_goes_on_from_its_window() -> None:
    resumed = make()
    compute(resumed, request(PROMPT, 1), 7.0)
    again = request(PROMPT, 2)
    assert resumed.covered(again, len(PROMPT)) == 0, "it is there once the next batch begins"
    resumed.cache.seats.upload()
    resumed.cache.window_buffers.rings[0][:, 1] = 8.0  # the request goes on
    assert resumed.covered(again, len(PROMPT)) == 20
    assert resumed.take(again, 2, 20) == len(PROMPT) - RECENT
    resumed.cache.seats.upload()
    assert rings(resumed)[2] == 7.0


def test_a_conversation_goes_on_from_what_a_finished_request_has_left() -> None:
    """A step may be under way that writes one token more, so the window begins one later."""
    resumed, first = make(), request(PROMPT, 1)
    compute(resumed, first, 7.0)
    resumed.cache.seats.upload()
    first.output_ids = [1, 2, 3, 4]
    resumed.cache.window_buffers.rings[0][:, 1] = 9.0
    resumed.left(first, 1, 24)
    following = request([*PROMPT, 1, 2, 3, 4, 5], 2)
    assert resumed.covered(following, 26) == 24
    assert resumed.take(following, 2, 24) == 24 + 1 - RECENT
    resumed.cache.seats.upload()
    assert rings(resumed)[2] == 9.0


def test_a_prompt_shorter_than_a_window_goes_on_from_its_beginning() -> None:
    resumed = make()
    compute(resumed, request(PROMPT[:7], 1), 7.0)
    resumed.cache.seats.upload()
    again = request(PROMPT[:7], 2)
    assert (resumed.covered(again, 7), resumed.take(again, 2, 4)) == (4, 0)


@pytest.mark.parametrize("hit", [0, 8, 12])
def test_a_short_hit_computes_its_window(hit: int) -> None:
    resumed = make()
    compute(resumed, request(PROMPT, 1), 7.0)
    resumed.cache.seats.upload()
    again = request(PROMPT, 2)
    resumed.covered(again, len(PROMPT))
    assert resumed.take(again, 2, hit) == hit
    assert resumed._brought == []


def test_only_the_same_tokens_in_the_same_name_space_go_on() -> None:
    resumed = make()
    compute(resumed, request(PROMPT, 1), 7.0)
    resumed.cache.seats.upload()
    longer = [*PROMPT, 1, 2]
    assert resumed.covered(request(longer), len(longer)) == 20
    assert resumed.covered(request(longer, extra_key="other"), len(longer)) == 0
    assert resumed.covered(request(longer, input_embeds=[0.0]), len(longer)) == 0
    assert resumed.covered(request(longer, multimodal_inputs=object()), len(longer)) == 0
    assert resumed.covered(request([0, *PROMPT[1:], 1, 2]), len(longer)) == 0
    far = [*PROMPT, *range(RECENT)]
    assert resumed.covered(request(far), len(far)) == 0, "it computes a whole window anyway"
    assert resumed.covered(request(PROMPT[:20]), 20) == 0, "its window would begin before the one that is kept"


def test_what_was_not_a_number_is_forgotten() -> None:
    resumed, broken = make(), request(PROMPT, 1)
    compute(resumed, broken, float("nan"))
    resumed.cache.seats.upload()
    broken.skip_radix_cache_insert = True
    resumed.left(broken, 1, 21)
    assert resumed.covered(request(PROMPT), len(PROMPT)) == 0
    broken = request(PROMPT, 2)
    compute(resumed, broken, float("nan"))
    broken.skip_radix_cache_insert = True
    resumed.left(broken, 2, 21)
    resumed.cache.seats.upload()
    assert resumed.covered(request(PROMPT), len(PROMPT)) == 0


def test_a_seat_that_is_left_before_its_copy_is_copied_at_once() -> None:
    """Its next owner may gain it in the batch before which the copy was due."""
    resumed, first = make(), request(PROMPT, 1)
    compute(resumed, first, 7.0)
    resumed.left(first, 1, 21)
    resumed.take(request([5] * 9), 1, 0)
    resumed.cache.window_buffers.rings[0][:, 1] = 1.0
    resumed.cache.seats.upload()
    again = request(PROMPT, 2)
    assert resumed.covered(again, len(PROMPT)) == 20
    resumed.take(again, 2, 20)
    resumed.cache.seats.upload()
    assert rings(resumed)[2] == 7.0


def test_what_is_due_does_not_overwrite_what_is_brought() -> None:
    """One slot: a batch goes on from the window in it, and before the same batch another is copied there."""
    resumed = make(windows=1)
    compute(resumed, request(PROMPT, 1), 7.0)
    resumed.cache.seats.upload()
    again, other = request(PROMPT, 2), request([3] * 30, 3)
    compute(resumed, other, 5.0)
    resumed.covered(again, len(PROMPT))
    resumed.take(again, 2, 20)
    resumed.cache.seats.upload()
    assert rings(resumed)[2] == 7.0
    assert resumed.covered(request(PROMPT), len(PROMPT)) == 0, "its window has made room"
    resumed.clear()
    assert resumed.covered(request([3] * 30), 30) == 0


def test_a_window_that_is_waited_for_does_not_make_room() -> None:
    """A waiting request has been promised the older of two windows when a batch runs that copies a third."""
    resumed = make(windows=2)
    for seat, prompt in enumerate((PROMPT, [3] * 30)):
        compute(resumed, request(prompt, seat), 7.0 + seat)
        resumed.cache.seats.upload()
    waiting = request(PROMPT, 2)
    assert resumed.covered(waiting, len(PROMPT)) == 20
    compute(resumed, request([4] * 30, 3), 5.0)
    resumed.cache.seats.upload()
    assert resumed.take(waiting, 2, 20) == len(PROMPT) - RECENT
    assert resumed.covered(request([3] * 30), 30) == 0


def matched(resumed: Resumed, *prompts: list[int]) -> list[Any]:
    """Waiting requests whose prefix hits count on windows, each looked for twice as SGLang does."""
    found = [request(prompt) for prompt in prompts]
    assert [resumed.covered(req, len(req.origin_input_ids)) > 0 for req in [*found, *found]] == [True] * 2 * len(found)
    return found


def test_a_window_that_is_counted_on_stays_when_others_leave_their_seats() -> None:
    """Requests are preempted, one just behind its prompt, one that came out as NaN, between a hit and its seat."""
    resumed = make(windows=1)
    whole = request(PROMPT, 1)
    compute(resumed, whole, 7.0)
    resumed.cache.seats.upload()
    compute(resumed, request([3] * 30, 2), 5.0)
    (waiting,) = matched(resumed, PROMPT)
    resumed.left(request([3] * 30, finished=lambda: False), 2, 30)
    whole.skip_radix_cache_insert = True
    resumed.left(whole, 1, 21)
    assert resumed.take(waiting, 3, 20) == len(PROMPT) - RECENT
    resumed.cache.seats.upload()
    assert rings(resumed)[3] == 7.0
    assert resumed.covered(request(PROMPT), len(PROMPT)) == 0, "nobody else finds what was not a number"
    compute(resumed, request([4] * 30, 4), 4.0)
    resumed.cache.seats.upload()
    assert resumed.covered(request([4] * 30), 30) > 0, "its slot is free again"


@pytest.mark.parametrize("over", ["batch", "flush"])
def test_windows_are_counted_on_until_a_batch_runs(over: str) -> None:
    """Requests that go on waiting, or are aborted in the queue, leave no slot taken."""
    resumed = make(windows=2)
    for prompt in ([3] * 30, [4] * 30):
        compute(resumed, request(prompt, 1), 3.0)
        resumed.cache.seats.upload()
    matched(resumed, [3] * 30, [4] * 30)
    following = request([5] * 32)
    for kept in (0, 28):
        resumed.take(finished := request([5] * 30), 2, 0)
        resumed.left(finished, 2, 30)
        assert resumed.covered(following, 32) == kept
        (resumed.cache.seats.upload if over == "batch" else resumed.clear)()


def test_the_least_recently_used_makes_room() -> None:
    store = WindowStore(2)

    def kept() -> list[int]:
        found = [store.find(None, [number] * TAIL, 9) for number in (1, 2, 3)]
        return [window.ids[0] for window in found if window is not None]

    one, two = (store.add(None, [number] * TAIL, 0) for number in (1, 2))
    assert one is not None
    assert two is not None
    assert store.add(None, [1] * TAIL, 1) is None, "of the same tokens there is one, the longest"
    three = store.add(None, [3] * TAIL, 1)
    assert three is not None
    assert (three.slot, kept()) == (two.slot, [1, 3])
    assert store.find(None, [3] * TAIL, 0) is None
    earlier = store.add(None, [3] * TAIL, 0)
    assert earlier is not None
    assert (earlier.slot, kept()) == (three.slot, [1, 3])
    store.drop(three)
    store.drop(one)
    assert kept() == [3]


@pytest.mark.parametrize(
    ("fields", "args", "said"),
    [
        ({"SGLANG_OSCAR_RECOMPUTE_RECENT": "0"}, {}, "SGLANG_OSCAR_RECOMPUTE_RECENT=0"),
        ({"SGLANG_MIXED_KV_RECENT_TOKENS": "0"}, {}, "no recent window"),
        ({}, {"speculative_algorithm": "NGRAM"}, "speculative decoding"),
        ({}, {"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({}, {"swa": True}, "sliding windows"),
    ],
)
def test_what_they_do_not_go_with(
    fields: dict[str, str], args: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "linear_config", lambda model: None)
    model = SimpleNamespace(is_hybrid_swa=args.pop("swa", False))
    given = SimpleNamespace(**{"speculative_algorithm": None, "disaggregation_mode": "null"} | args)
    feature.check(given, Settings.from_env(fields), model)
    with pytest.raises(Int2Error, match=f"SGLANG_OSCAR_KEPT_WINDOWS does not go with .*{said}.*; unset it"):
        feature.check(given, Settings.from_env(fields | {"SGLANG_OSCAR_KEPT_WINDOWS": "4"}), model)
