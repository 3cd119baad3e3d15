"""What differs between releases of SGLang is found by what is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_oscar.attach import releases

REQUESTS = {
    "flat": SimpleNamespace(req_pool_idx=3, kv_committed_len=70, kv=SimpleNamespace(), prefix_indices=[0] * 64),
    "nested": SimpleNamespace(kv=SimpleNamespace(req_pool_idx=3, kv_committed_len=70), prefix_len=64),
}


@pytest.mark.parametrize("shape", REQUESTS)
def test_requests(shape: str) -> None:
    req = REQUESTS[shape]
    assert (releases.seat(req), releases.committed_tokens(req), releases.prefix_tokens(req)) == (3, 70, 64)


def test_a_request_that_looks_otherwise_is_an_error() -> None:
    strange = SimpleNamespace(kv=SimpleNamespace())
    for ask in (releases.seat, releases.committed_tokens, releases.prefix_tokens):
        with pytest.raises(AttributeError):
            ask(strange)


def test_namespaces_differ_by_key_and_by_salt() -> None:
    plain, salted = SimpleNamespace(extra_key="a"), SimpleNamespace(extra_key="a", cache_salt="b")
    assert releases.namespace(plain) != releases.namespace(salted)
    assert releases.namespace(plain) == releases.namespace(SimpleNamespace(extra_key="a", cache_salt=None))


def test_server_arguments() -> None:
    """The view of a record reads what the record says while nothing was decided, the group size included."""
    record: Any = SimpleNamespace(device=None, kv_cache_quant_group_size=64)
    assert releases.resolved(record).device is None
    assert releases.resolved(record).kv_cache_quant_group_size == 64
    assert not releases.is_resolved(record)
    assert releases.is_resolved(SimpleNamespace(_resolution_finished=True))


def test_decisions_are_read_through_the_view() -> None:
    decided = SimpleNamespace(device=None, _resolved_overrides=[("a hook", {"device": "cuda"})])
    expected = "cuda" if releases.resolved(decided) is not decided else None
    assert releases.resolved(decided).device == expected


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"num_token_non_padded": None}, ("num_token_non_padded", "num_token_non_padded_cpu")),
        (
            {"num_token_non_padded": None, "global_num_token_non_padded": None},
            ("global_num_token_non_padded", "global_num_token_non_padded_cpu"),
        ),
    ],
)
def test_real_token_counts(batch: dict[str, Any], names: tuple[str, str]) -> None:
    assert releases.real_token_counts(SimpleNamespace(**batch)) == names


def test_names_that_exist() -> None:
    assert releases.first_existing(["sglang.srt.nowhere", "sglang.srt.server_args.ServerArgs.nowhere"]) is None
    found = releases.first_existing(["sglang.nowhere.f", "sglang.srt.server_args.ServerArgs.check_server_args"])
    assert found == "sglang.srt.server_args.ServerArgs.check_server_args"
