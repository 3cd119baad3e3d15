"""No kernel is built while requests wait, by servers of every kind of model and of every backend.

The server says so itself (:mod:`sglang_oscar.requests.late_kernels`): cold prompts of many lengths, prefix hits,
chunks and many requests at once must not make it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_exact_rows import COMMON, INT2, KINDS, TRAINED, TURNS, ask, next_turn, opening

from oscar_tools.local_server import ServerFailedError
from support import golden
from support.fleet import Fleet, each
from support.servers import HADAMARD, Server, serve
from support.speculation import with_plugins


def built_late(server: Server) -> list[str]:
    """Kernels that a server built once it took requests."""
    return re.findall(r"int2 kernel (\S+) was built", server.text())


@pytest.mark.parametrize("name", [name for name in KINDS if 1 in KINDS[name].ranks])
def test_of_every_kind_of_model(name: str, tmp_path: Path) -> None:
    if name == "hybrid_trained" and not TRAINED:
        pytest.skip("OSCAR_TEST_HYBRID names no trained hybrid model")
    kind = KINDS[name]
    model = kind.model(tmp_path / "model")
    args, env = [*INT2, *COMMON, *kind.args, *kind.int2(model)], with_plugins(HADAMARD, *kind.plugins)
    try:
        with serve(model, tmp_path / "log", *args, env=env) as server:
            prompts = opening(kind.images)
            for turn in range(TURNS):
                prompts = next_turn(prompts, ask(server, prompts, workers=1 + turn * 4), seed=turn)
            assert built_late(server) == []
    except ServerFailedError as error:
        if refused := re.search(r"error: (.* on a GPU.*)", str(error)):
            pytest.skip(refused[1])
        raise


@each("plain", "per_head", "by_layer", "by_head", "triton", "triton_extend", "triton_decode", "fa3", "flashinfer",
      "chunked", "mixed", "speculating", "by_layer_speculating", "speculating_triton")  # fmt: skip
def test_of_every_backend(name: str, fleet: Fleet) -> None:
    server = fleet[name]
    golden.conversations(server)
    golden.many(server, workers=64)
    assert built_late(server) == []
