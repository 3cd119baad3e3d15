"""Which requests came out as NaN, and what becomes of them; without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from test_lifecycle import SINK, admit, finish, make_cache, request

from sglang_oscar.attach import releases
from sglang_oscar.memory.logits_column import LogitsColumn
from sglang_oscar.requests import nan

NAN = float("nan")


def rows(*broken: int, of: int = 6) -> torch.Tensor:
    logits = torch.zeros(of)
    logits[list(broken)] = NAN
    return logits


@pytest.mark.parametrize(
    ("column", "lengths", "broken"),
    [
        (LogitsColumn(rows(), 1), [1] * 6, []),
        # A graph's batch is padded: what lies behind the requests is nobody's.
        (LogitsColumn(rows(1, 5), 1), [1] * 4, [1]),
        # Chains: the first ones are accepted. Trees: whichever.
        (LogitsColumn(rows(2, 4), 3), [2, 2], [1]),
        (LogitsColumn(rows(2, 4), 3, torch.tensor([[0, 2, -1], [3, -1, -1]])), [2, 1], [0]),
    ],
)
def test_rows_that_count(column: LogitsColumn, lengths: list[int], broken: list[int]) -> None:
    assert column.broken(lengths) == broken


def test_what_is_noted_is_sampled_as_zeros() -> None:
    """Sampling from NaN may stop the process."""
    cache = make_cache()
    logits = torch.zeros(2, 5)
    logits[1] = NAN
    batch = SimpleNamespace(batch_size=2, forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    nan.note(cache, batch, SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits)))
    assert not logits.any(), "what is sampled must be numbers"
    assert cache.logits is not None
    assert cache.logits.broken([1, 1]) == [1]


def scheduler_of(cache: Any, chunked: Any = None) -> Any:
    return SimpleNamespace(
        tree_cache=SimpleNamespace(req_to_token_pool=cache.req_to_token_pool, shared=[]), chunked_req=chunked
    )


def process(cache: Any, *requests: Any, broken: list[int]) -> None:
    """What SGLang's scheduler does with the result of a step, as far as it concerns us."""
    scheduler = scheduler_of(cache)
    batch, result = SimpleNamespace(reqs=list(requests)), SimpleNamespace(copy_done=None)
    cache.logits = LogitsColumn(rows(*broken, of=len(requests)), 1)
    nan.after_run_batch(result, scheduler, batch)
    assert cache.logits is None
    nan.before_process_batch_result(scheduler, batch, result)


def running(first: int, **fields: Any) -> Any:
    state = {"finished": lambda: False, "is_retracted": False, "inflight_middle_chunks": 0, "to_finish": None}
    return request(first, **state | {"skip_radix_cache_insert": False} | fields)


def test_a_broken_request_ends_and_leaves_nothing() -> None:
    """Its sink block was published when its prompt was taken in; the next one that begins alike computes it anew."""
    cache = make_cache()
    good, bad = running(1), running(2)
    admit(cache, good, bad)
    process(cache, good, bad, broken=[1])
    assert good.to_finish is None
    assert "not a number" in bad.to_finish.message
    assert bad.to_finish.status_code == 500
    assert bad.skip_radix_cache_insert
    finish(cache, good)
    finish(cache, bad)
    assert admit(cache, running(1, hit=SINK)) == []
    assert len(admit(cache, running(2, hit=SINK))) == 1


@pytest.mark.parametrize(
    "fields", [{"finished": lambda: True}, {"is_retracted": True}, {"inflight_middle_chunks": 1}], ids=" ".join
)
def test_who_is_left_alone(fields: dict[str, Any]) -> None:
    """Finished, retracted, or in the middle of its prompt, which is looked at before it is shared."""
    cache = make_cache()
    req = running(1, **fields)
    admit(cache, req)
    process(cache, req, broken=[0])
    assert req.to_finish is None


class Extent(NamedTuple):
    end: int


def checkpoint(req: Any, tree_cache: Any) -> None:
    """SGLang's: older releases know by ``prefix_indices`` where the next chunk begins, and leave them where a request
    is not to be shared.
    """
    if not req.skip_radix_cache_insert:
        tree_cache.shared.append(req.extend_range.end)
        req.prefix_indices = torch.arange(req.extend_range.end)
        req.cache_protected_len = req.extend_range.end


def newer_checkpoint(req: Any, tree_cache: Any) -> None:
    """SGLang's: newer releases know it by ``prefix_len``."""
    if not req.skip_radix_cache_insert:
        tree_cache.shared.append(req.extend_end)
        req.kv.cache_protected_len = req.extend_end
    req.prefix_len = req.extend_end


class Prompt:
    """A prompt in chunks of four tokens beside another request, in the loop of SGLang's scheduler."""

    def __init__(self, newer: bool = False, overlap: bool = True, mamba: bool = False) -> None:
        self.cache = make_cache()
        self.cache.req_to_token_pool.req_to_token = torch.arange(40, dtype=torch.int32).view(4, 10)
        self.other, self.bad = running(1), running(2, inflight_middle_chunks=1)
        admit(self.cache, self.other, self.bad)
        self.newer, self.overlap = newer, overlap
        if newer:
            del self.bad.prefix_indices
            self.bad.prefix_len, self.bad.kv = 0, SimpleNamespace(cache_protected_len=0)
        else:
            self.bad.cache_protected_len = 0
        self.scheduler = scheduler_of(self.cache, self.bad)
        self.tree = self.scheduler.tree_cache
        self.tree.supports_mamba, self.tree.supports_swa = lambda: mamba, lambda: False
        self.pending: list[Any] = []

    def step(self, end: int, *broken: int) -> None:
        """Compute a chunk; with overlap, what came out of it is read behind the next one."""
        if self.newer:
            self.bad.extend_end = end
        else:
            self.bad.extend_range = Extent(end)
        batch, result = SimpleNamespace(reqs=[self.other, self.bad]), SimpleNamespace(copy_done=None)
        self.cache.logits = LogitsColumn(rows(*broken, of=2), 1)
        nan.after_run_batch(result, self.scheduler, batch)
        self.pending.append((batch, result))
        if len(self.pending) > self.overlap:
            nan.before_process_batch_result(self.scheduler, *self.pending.pop(0))
        nan.around_checkpoint(newer_checkpoint if self.newer else checkpoint, self.bad, self.tree)
        assert releases.prefix_tokens(self.bad) == end, "else the same tokens are computed for ever"


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(
    ("overlap", "mamba", "shared"), [(True, False, [4]), (False, False, [4, 8]), (True, True, [4, 8])]
)
def test_a_chunk_is_shared_once_its_result_is_known(newer: bool, overlap: bool, mamba: bool, shared: list[int]) -> None:
    prompt = Prompt(newer, overlap, mamba)
    prompt.step(4)
    prompt.step(8)
    assert prompt.tree.shared == shared
    assert (prompt.bad.extend_end if newer else prompt.bad.extend_range.end) == 8


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(("overlap", "mamba"), [(True, False), (False, False), (True, True)])
def test_nothing_of_a_broken_chunk_is_shared(newer: bool, overlap: bool, mamba: bool) -> None:
    """The prompt goes on to its end, where its client is told; an earlier chunk and the sinks of others stay."""
    prompt = Prompt(newer, overlap, mamba)
    for end, broken in ((4, ()), (8, (1,)), (10, (1,)), (10, (1,))):
        prompt.step(end, *broken)
        assert prompt.tree.shared in ([], [4])
    bad, other, cache = prompt.bad, prompt.other, prompt.cache
    assert prompt.tree.shared == [4]
    assert "not a number" in bad.to_finish.message
    if not newer:
        assert bad.prefix_indices.tolist() == list(range(bad.req_pool_idx * 10, bad.req_pool_idx * 10 + 10))
    assert other.to_finish is None
    finish(cache, other)
    finish(cache, bad)
    assert admit(cache, running(1, hit=SINK)) == []
    assert len(admit(cache, running(2, hit=SINK))) == 1


def test_a_chunk_of_a_request_that_is_over() -> None:
    """Its client has gone away, and its row is somebody else's."""
    prompt = Prompt()
    prompt.step(4, 1)
    finish(prompt.cache, prompt.bad)
    prompt.bad.req_pool_idx, prompt.bad.finished = None, lambda: True
    nan.before_process_batch_result(prompt.scheduler, *prompt.pending.pop(0))
    assert prompt.bad.to_finish is None


def test_results_of_chunks_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the GPU has nothing to do while the next chunk is scheduled."""
    prompt = Prompt()
    prompt.step(4)
    monkeypatch.setattr(LogitsColumn, "broken", lambda *_: pytest.fail("waited for"))
    monkeypatch.setattr(nan, "before_process_batch_result", lambda *_: None)
    prompt.step(8)


def test_a_request_is_ended_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache()
    req = running(1)
    admit(cache, req)
    process(cache, req, broken=[0])
    process(cache, req, broken=[0])
    assert len(caplog.records) == 1
