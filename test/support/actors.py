"""Functions that trainers run in Ray actors, and actors for them: fresh interpreters that unpickle and call."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.servers import server_environment

MARKER = "actor returned:"
ACTOR = "import pickle, sys; function, arguments = pickle.load(sys.stdin.buffer); function(*arguments)"
Said = dict[str, Any]


def call(function: Callable[..., Said], arguments: Said, late: dict[str, str]) -> Said:
    """What a function of this module returns in an actor.

    Args:
        function: called with ``arguments`` and ``late``.
        arguments: of the server.
        late: environment variables that are set in the actor, once it runs.
    """
    done = subprocess.run(
        [sys.executable, "-c", ACTOR],
        input=pickle.dumps((_returned, (function, arguments, late))),
        env=server_environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
        capture_output=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:].decode()
    return pickle.loads(base64.b64decode(done.stdout.rpartition(MARKER.encode())[2]))


def _returned(function: Callable[..., Said], arguments: Said, late: dict[str, str]) -> None:
    os.environ.update(late)
    said = function(arguments)
    print(MARKER + base64.b64encode(pickle.dumps(said)).decode(), flush=True)


def hooked() -> set[str]:
    """Functions of SGLang that are hooked in this process."""
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    return set() if registry is None else set(registry.HookRegistry._patched)


def wrongly_hooked() -> set[str]:
    """Hooks of arguments that this process lacks, and hooks of schedulers that it has."""
    from sglang_oscar.attach import touchpoints

    arguments = {point.target() for point in touchpoints.of_arguments()}
    return arguments ^ (hooked() & (arguments | {point.target() for point in touchpoints.of_scheduler(True)}))


class LaunchedError(Exception):
    """Raised where schedulers would be started."""


def _stop(cls: type, server_args: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_oscar.attach import gate, processes, releases
    from sglang_oscar.names import CHOSEN_ROTATIONS

    resolved = releases.resolved(server_args)
    raise LaunchedError(
        {
            "passed": gate.has_passed(server_args),
            "page size": resolved.page_size,
            "backend": resolved.attention_backend,
            "rotations": server_args.__dict__[CHOSEN_ROTATIONS]["keys"],
            "workers hear": os.environ[processes.MARK],
            "wrongly hooked": wrongly_hooked(),
        }
    )


def _until_schedulers_start(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Said:
    """What a launch has decided by then, in this process."""
    from sglang.srt.entrypoints.engine import Engine

    Engine._launch_scheduler_processes = classmethod(_stop)  # type: ignore[assignment]
    try:
        launch(*args, **kwargs)
    except LaunchedError as launched:
        return launched.args[0]
    raise AssertionError("no scheduler was started")


def engine_in_actor(arguments: Said) -> Said:
    """verl: the actor makes an Engine."""
    import sglang

    return _until_schedulers_start(sglang.Engine, **arguments)


def _send(connection: Connection, function: Callable[..., Said], *arguments: Any) -> None:
    connection.send(function(*arguments))


def _in_child(method: str, function: Callable[..., Said], *arguments: Any) -> Said:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context(method).Process(target=_send, args=(there, function, *arguments))
    child.start()
    there.close()
    try:
        return here.recv() | {"actor": hooked()}
    finally:
        child.join()


def engine_in_child(arguments: Said) -> Said:
    """An Engine in a forked child of the actor, which has imported SGLang meanwhile."""
    import sglang  # noqa: F401

    return _in_child("fork", engine_in_actor, arguments)


def _serve(server_args: Any) -> Said:
    from sglang.srt.entrypoints.http_server import launch_server

    return _until_schedulers_start(launch_server, server_args)


def server_in_child(arguments: Said) -> Said:
    """slime, NeMo-RL: the actor makes server arguments, a spawned child serves them; no trainer loads plugins."""
    from sglang.srt.server_args import ServerArgs

    return _in_child("spawn", _serve, ServerArgs(**arguments))


def server_in_forked_child(arguments: Said) -> Said:
    """SGLang's own ``launch_server_process``: the actor resolves the arguments, too."""
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**arguments)
    server_args.resolve_once()
    return _in_child("fork", _serve, server_args)
