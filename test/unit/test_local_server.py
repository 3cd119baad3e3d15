"""Ports that are given out and not yet listened on are nobody else's, in this process and in others; and how long a
server may take until it listens."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys

import pytest

from oscar_tools import local_server


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux's kernel")
def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = local_server.free_port()
    other = local_server.free_port()
    draws = itertools.chain([port, port, other], range(20_000, 32_000))
    monkeypatch.setattr(random, "SystemRandom", type("Drawn", (), {"randrange": lambda *_: next(draws)}))
    assert local_server.free_port() in set(range(20_000, 32_000)) - {port, other}


@pytest.mark.parametrize(("text", "seconds"), [("", 1800.0), ("90", 90.0), ("soon", None), ("-1", None), ("nan", None)])
def test_how_long_a_server_may_take_to_start(text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_START_TIMEOUT", text)
    if seconds is None:
        with pytest.raises(local_server.ServerFailedError, match=f"OSCAR_START_TIMEOUT={text} is no number"):
            local_server.start_timeout()
    else:
        assert local_server.start_timeout() == seconds


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names of Linux's kernel")
def test_another_process_does_not_get_it() -> None:
    """And gets it once the one that has claimed it is gone."""

    def claimed(port: int) -> bool:
        process = multiprocessing.get_context("fork").Process(target=local_server._claim, args=(port,))
        process.start()
        process.join()
        return process.exitcode == 0

    assert not claimed(local_server.free_port())
    theirs = random.SystemRandom().randrange(40_000, 60_000)
    assert claimed(theirs)
    assert claimed(theirs)
