"""The gate around SGLang's resolution of arguments: who is told what, and that workers notice where it did not run."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from oscar_cpu import window_attention
from sglang_oscar.attach import failure, flags, gate, releases
from sglang_oscar.attention import backend
from sglang_oscar.errors import EXIT_CODE, Int2Error
from sglang_oscar.memory import sizing


def refuse(original: Any, server_args: Any) -> None:
    raise Int2Error("no")


def test_the_command_line_gets_one_line_and_python_an_exception(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where arguments are resolved after the command line was read."""
    monkeypatch.setattr(gate, "resolve", refuse)
    made = SimpleNamespace(kv_cache_dtype="int2")
    with pytest.raises(Int2Error):
        gate.around_resolution(print, made)
    assert gate.around_prepare_server_args(lambda argv: made, []) is made
    with pytest.raises(SystemExit) as caught:
        gate.around_resolution(print, made)
    assert caught.value.code == EXIT_CODE
    assert capsys.readouterr().err == "sglang-oscar: error: no\n"


def test_ordinary_arguments_are_not_marked() -> None:
    made = SimpleNamespace(kv_cache_dtype="auto", kv_cache_quant_group_size=None)
    before = dict(vars(made))
    assert gate.around_prepare_server_args(lambda argv: made, []) is made
    gate.around_resolution(lambda record: None, made)
    assert vars(made) == before


def test_a_refusal_while_the_command_line_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    def original(argv: list[str]) -> None:
        raise Int2Error("no")

    with pytest.raises(SystemExit) as caught:
        gate.around_prepare_server_args(original, [])
    assert caught.value.code == EXIT_CODE
    assert capsys.readouterr().err == "sglang-oscar: error: no\n"


def test_arguments_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's arguments went through the gate of the process that launched it."""
    monkeypatch.setattr(gate, "resolve", refuse)
    calls: list[Any] = []
    worker = SimpleNamespace(_resolution_finished=True)
    gate.around_resolution(calls.append, worker)
    assert calls == [worker]


def test_a_gate_that_never_ran_is_noticed_in_the_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook can attach and never be called: then nothing was refused, and no page size or backend was set."""
    arguments = SimpleNamespace(kv_cache_dtype="int2")
    monkeypatch.setattr(failure, "reason", lambda: None)
    monkeypatch.setattr(backend, "register", lambda: None)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: arguments)
    model = SimpleNamespace(is_hybrid_swa=False)
    monkeypatch.setattr(releases, "model_config", lambda args: model)
    monkeypatch.setattr(window_attention, "register", lambda: None)

    def configured() -> Any:
        return sizing.around_configure_kv_cache_dtype(
            print, server_args_kv_cache_dtype="int2", is_draft_worker=False, model_dtype=torch.bfloat16
        )

    with pytest.raises(SystemExit) as caught:
        configured()
    assert caught.value.code == EXIT_CODE
    assert "passed none of its checks" in capsys.readouterr().err
    setattr(arguments, gate.PASSED, True)
    assert configured() == ("int2", torch.uint8)
    # Stock backends of layers with a window read the type of their own pool here.
    model.is_hybrid_swa = True
    assert configured() == ("auto", torch.bfloat16)


def test_the_mark_reaches_workers() -> None:
    """SGLang pickles server arguments; the marks and the group size come along."""
    flags.install()
    if not hasattr(ServerArgs, "resolve_once"):
        made = ServerArgs.__new__(ServerArgs)
        made.__dict__.update(kv_cache_quant_group_size=64)
    else:
        made = ServerArgs(model_path="x")
        made.__dict__["kv_cache_quant_group_size"] = 64
    made.__dict__[gate.PASSED] = True
    worker = pickle.loads(pickle.dumps(made))
    assert gate.has_passed(worker)
    assert worker.kv_cache_quant_group_size == 64


def test_another_dtype_than_asked_for_is_refused() -> None:
    decided: Any = SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(Int2Error, match="insists on --kv-cache-dtype fp8_e4m3"):
        gate.check(decided, SimpleNamespace(), None)  # type: ignore[arg-type]


class Resolvable:
    """SGLang's server arguments of a release that keeps what was asked for."""

    def __init__(self, kv_cache_dtype: str, page_size: int | None = None) -> None:
        self.kv_cache_dtype, self.page_size = kv_cache_dtype, page_size

    def resolve_once(self) -> None:
        self._raw_input = {"kv_cache_dtype": self.kv_cache_dtype, "page_size": self.page_size}
        self.page_size = self.page_size or 1
        self._resolution_finished = True


Resolvable.kv_cache_quant_group_size = None  # type: ignore[attr-defined]


def test_arguments_that_were_resolved_before_plugins_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``launch_server(server_args)`` does: they are resolved again through the gate, from what was asked for."""

    def through_the_gate(original: Any, server_args: Any) -> None:
        assert server_args.page_size is None
        server_args.page_size = 64
        original(server_args)
        server_args.__dict__[gate.PASSED] = True

    made = Resolvable("int2")
    made.resolve_once()
    stock = Resolvable.resolve_once
    monkeypatch.setattr(gate, "resolve", through_the_gate)
    monkeypatch.setattr(Resolvable, "resolve_once", lambda self: gate.around_resolution(stock, self))
    monkeypatch.setattr(gate.refusals, "check_arguments", lambda args: None)
    gate.before_check_server_args(made)
    assert gate.has_passed(made)
    assert made.page_size == 64
    kept_nothing = SimpleNamespace(kv_cache_dtype="int2")
    with pytest.raises(Int2Error, match="passed none of its checks"):
        gate.before_check_server_args(kept_nothing)
