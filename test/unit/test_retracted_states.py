"""Hybrids on a decode server: a step that runs is taken up before requests are retracted with their states."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_oscar.features.hybrids import retraction
from sglang_oscar.memory.owned import STATE

RUNS = {"mode": DisaggregationMode.DECODE, "states": True, "overlap": True, "last": "batch", "fits": False, "step": 1}


@pytest.mark.parametrize(
    ("changed", "order"),
    [
        ({}, ["result", "update"]),
        ({"fits": True, "step": 10}, ["result", "update"]),
        ({"fits": True}, ["update"]),
        ({"states": False}, ["update"]),
        ({"mode": DisaggregationMode.NULL}, ["update"]),
        ({"overlap": False}, ["update"]),
        ({"last": None}, ["update"]),
    ],
)
def test_a_step_is_taken_up_before_its_requests_go(
    changed: dict[str, Any], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short or a test retracts every fifth step; then there is no last batch whose result is due."""
    from sglang.srt.managers import scheduler as of_sglang

    case, done = SimpleNamespace(**RUNS | changed), []
    monkeypatch.setattr(of_sglang, "TEST_RETRACT", True)
    monkeypatch.setattr(of_sglang, "TEST_RETRACT_INTERVAL", 5)
    holdings = {STATE: None} if case.states else {}
    monkeypatch.setattr(retraction, "cache_of", lambda pool: SimpleNamespace(holdings=holdings))
    scheduler = SimpleNamespace(
        last_batch=case.last,
        enable_overlap=case.overlap,
        disaggregation_mode=case.mode,
        forward_ct=case.step,
        result_queue=deque([("batch", "result")] if case.last and case.overlap else []),
        process_batch_result=lambda batch, result: done.append(result),
    )
    batch = SimpleNamespace(req_to_token_pool=None, check_decode_mem=lambda: case.fits)
    retraction.around_update_running_batch(lambda self, batch: done.append("update"), scheduler, batch)
    assert done == order
    assert (scheduler.last_batch, len(scheduler.result_queue)) == (None, 0) or order == ["update"]
