"""How trainers launch SGLang: hooks are where the engine is and nowhere else, and what an actor sets late counts.

Launches go as far as their schedulers. AReaL runs ``python -m sglang.launch_server``, as other tests do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_oscar.attach.releases import exists
from support import actors
from support.models import save
from support.servers import HADAMARD

SERVERS = [actors.server_in_child, actors.server_in_forked_child]


@pytest.mark.parametrize("launch", [actors.engine_in_actor, actors.engine_in_child, *SERVERS])
def test_launches_of_trainers(launch: Any, tmp_path: Path) -> None:
    if launch in SERVERS and not exists("sglang.srt.server_args.ServerArgs.resolve_once"):
        pytest.skip("this release resolves arguments as they are made, before anyone loads plugins, and is refused")
    model = str(save("qwen3", tmp_path))
    said = actors.call(launch, {"model_path": model, "kv_cache_dtype": "int2"}, HADAMARD)
    assert said["passed"]
    assert (said["page size"], said["backend"], said["rotations"]) == (64, "oscar", "hadamard")
    assert said["workers hear"] == "int2"
    assert said["wrongly hooked"] == set()
    if launch is not actors.engine_in_actor:
        assert said["actor"] == set()
