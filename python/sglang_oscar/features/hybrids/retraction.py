"""Retraction on a decode server: states are taken along to the host, and must be those of the tokens that go with them.

With overlap scheduling SGLang retracts while a step runs, whose token it throws away. Rows of that step are written
again when the request goes on; a state has moved on, and would take the token a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.memory.cache import cache_of
from sglang_oscar.memory.owned import STATE


def around_update_running_batch(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """Take up the result of the step that runs before requests are retracted, as SGLang does where it pauses."""
    cache = cache_of(batch.req_to_token_pool)
    if cache is not None and STATE in cache.holdings and self.last_batch and self.enable_overlap:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        if self.disaggregation_mode == DisaggregationMode.DECODE and _retracts(self, batch):
            self.process_batch_result(*self.result_queue.popleft())
            self.last_batch = None
    return original(self, batch)


def _retracts(scheduler: Any, batch: Any) -> bool:
    """Whether SGLang is about to retract requests of a batch: for memory, or because a test wants it."""
    from sglang.srt.managers import scheduler as of_sglang

    wanted = of_sglang.TEST_RETRACT and scheduler.forward_ct % of_sglang.TEST_RETRACT_INTERVAL == 0
    return wanted or not batch.check_decode_mem()
