"""What a trainer may ask for, and what is refused: then the matrices are the old ones, and the line says why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import CheckWeightsReqInput

from oscar_kernels.cache import Windows
from oscar_rotation.dump.writer import DumpWriter
from sglang_oscar.attention.call import Call
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.refitting import actions
from sglang_oscar.features.refitting.ranks import Ranks
from sglang_oscar.features.refitting.samples import Samples, Sampling
from sglang_oscar.formats import origin
from support.small_cache import small_cache


@pytest.fixture
def updater(group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a server that is idle."""
    requests = SimpleNamespace()
    cache = small_cache(Windows(0, 0, 0), requests=requests)
    cache.sampler, cache.recipe = Samples(), "focus"
    args = SimpleNamespace(disaggregation_mode="null", nnodes=1, dp_size=1, pp_size=1)
    monkeypatch.setattr(actions.releases, "resolved", lambda args: args)
    runner = SimpleNamespace(req_to_token_pool=requests, server_args=args)
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), tp_cpu_group=group, flush_cache=lambda: True, cache=cache
    )


def sampling(folder: Path, **facts: Any) -> Sampling:
    writer = DumpWriter(folder, total_kv_heads=2)
    return Sampling(writer, {0: 0, 1: 1}, {}, 100, origin.changes(), **facts)


def answer(updater: Any, action: str) -> Any:
    original = pytest.fail
    return actions.around_check_weights(original, updater, CheckWeightsReqInput(action=action))


def test_other_actions_are_sglangs(updater: Any) -> None:
    asked = CheckWeightsReqInput(action="checksum")
    assert actions.around_check_weights(lambda *given: given, updater, asked) == (updater, asked)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"disaggregation_mode": "prefill"}, "start both on files of a new fit"),
        ({"nnodes": 2}, "several nodes"),
        ({"dp_size": 2}, "replicas"),
        ({"pp_size": 2}, "stages"),
    ],
)
def test_servers_that_are_not_refitted(updater: Any, changed: dict[str, Any], said: str) -> None:
    vars(updater.tp_worker.model_runner.server_args).update(changed)
    for action in ("oscar_sample", "oscar_refit"):
        reply = answer(updater, action)
        assert not reply.success
        assert said in reply.message


@pytest.mark.parametrize("given", ["many", "0", "-3"])
def test_a_number_of_tokens(updater: Any, given: str) -> None:
    assert "no number of tokens" in answer(updater, f"oscar_sample:{given}").message


def test_what_is_fitted_to_nothing(updater: Any) -> None:
    updater.cache.recipe = "hadamard"
    assert "fitted to nothing" in answer(updater, "oscar_sample").message


def test_samples_that_do_not_do(updater: Any, tmp_path: Path) -> None:
    cache = updater.cache
    assert "nothing was sampled" in answer(updater, "oscar_refit").message
    cache.sampler.sampling = sampling(tmp_path)
    assert "no whole prompt" in answer(updater, "oscar_refit").message
    cache.sampler.sampling = sampling(tmp_path, tokens=50, fault="disk full")
    assert "disk full" in answer(updater, "oscar_refit").message
    cache.sampler.sampling = sampling(tmp_path, tokens=50)
    origin.note_changed()
    assert "weights have changed" in answer(updater, "oscar_refit").message


def test_requests_that_run_refuse_a_refit(updater: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fitted before the cache is empty: old rows cannot meet new matrices."""
    updater.cache.sampler.sampling = sampling(tmp_path, tokens=50)
    updater.flush_cache = lambda: False
    monkeypatch.setattr(actions, "_fitted", pytest.fail)
    assert "requests run or wait" in answer(updater, "oscar_refit").message


def test_a_fit_that_fails_says_why(updater: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises; what was sampled stays for another try."""
    updater.cache.sampler.sampling = sampling(tmp_path, tokens=50)

    def fail(*args: Any) -> str:
        raise torch.OutOfMemoryError("no room\nfor details")

    monkeypatch.setattr(actions, "_fitted", fail)
    monkeypatch.setattr(actions, "put", pytest.fail)
    assert answer(updater, "oscar_refit").message == "oscar_refit: OutOfMemoryError: no room"
    assert updater.cache.sampler.sampling is not None


def test_ranks_agree(group: Any) -> None:
    ranks = Ranks(group)
    assert ranks.all(lambda: 3) == ranks.first(lambda: 3) == 3
    for ask in (ranks.all, ranks.first):
        with pytest.raises(Int2Error, match="why"):
            ask(lambda: (_ for _ in ()).throw(Int2Error("why")))


def batch(*requests: tuple[str, int, int]) -> Any:
    rids, prefixes, lengths = zip(*requests, strict=True)
    return SimpleNamespace(rids=list(rids), extend_prefix_lens_cpu=list(prefixes), extend_seq_lens_cpu=list(lengths))


def test_whole_prompts_are_sampled_up_to_a_budget(tmp_path: Path) -> None:
    """Not what hits a prefix, nor health checks."""
    samples = Samples()
    assert not samples.begin(batch(("a", 0, 4)))
    samples.sampling = sampling(tmp_path)
    assert not samples.begin(batch(("a", 9, 4), ("HEALTH_CHECK_1", 0, 5)))
    for _ in range(2):
        assert samples.begin(batch(("a", 9, 4), ("b", 0, 60)))
        x = torch.arange(64.0)[:, None, None].expand(64, 2, 8)
        for layer in (0, 1):
            samples.add(Call(x, x, x, torch.zeros(64), layer, 1.0))
    assert samples.sampling.tokens == 120
    assert not samples.begin(batch(("c", 0, 4)))
    written = torch.load(tmp_path / "layer_1" / "k" / "2.pt")
    assert torch.equal(written[:, 0, 0], torch.arange(4.0, 64.0))


def test_a_full_disk_ends_sampling_and_no_request(tmp_path: Path) -> None:
    samples = Samples()
    samples.sampling = sampling(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("")
    assert samples.begin(batch(("b", 0, 60)))
    x = torch.zeros(60, 2, 8)
    samples.add(Call(x, x, x, torch.zeros(60), 0, 1.0))
    assert samples.sampling.fault
    assert not samples.begin(batch(("b", 0, 60)))
