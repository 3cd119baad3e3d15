"""Ports that are given out and not yet listened on are nobody else's, in this process and in others; and how long a
server may take until it listens."""

from __future__ import annotations

import itertools
import random
import subprocess
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
    claim = "import sys\nfrom oscar_tools.local_server import _claim\n_claim(int(sys.argv[1]))"
    port = local_server.free_port()
    ours = subprocess.run([sys.executable, "-c", claim, str(port)], capture_output=True, text=True, check=False)
    assert "Address already in use" in ours.stderr
    theirs = str(random.SystemRandom().randrange(40_000, 60_000))
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", claim, theirs], check=False).returncode == 0
