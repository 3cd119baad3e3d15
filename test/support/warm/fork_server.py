"""The warm process: imports, then forks what it is asked for.

A new process has to be a child of the one that asks for it, so that waiting, exit statuses, process trees and
PR_SET_PDEATHSIG are as ever. The warm process is a child of the asking one; it forks a process in between, which forks
the new one and ends, and the asking process, a "child subreaper" for that moment, inherits the orphan.

Before it does anything else, the new process forks a warm process of its own: the workers of a server come from that.

What is asked for may be a warm process itself: with the libraries that are there it goes on to import SGLang.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
import traceback

from support.warm import channel, inherit, interpreter, preload
from support.warm.client import Client, install
from support.warm.launch import Launch
from support.warm.rule import Warm, boots, counted, counting, replacing


def main(number: int) -> None:
    """Body of a warm process whose channel is file descriptor ``number``. In a forked process it runs the program."""
    started, before = dict(os.environ), None
    while True:
        control = socket.socket(fileno=number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        warm = warmed(started, before)
        channel.send(control, marshal.dumps(vars(warm)))
        launch, client = serve(control, warm)
        if client is not None:
            break
        interpreter.place(launch, warm)
        started, before, number = launch.environment, warm, launch.descriptors[-1][1]
    install(lambda launch: None if boots(launch) else client)
    interpreter.become(launch, warm)
    assert launch.program is not None
    interpreter.run(launch.program)


def warmed(started: dict[str, str], before: Warm | None) -> Warm:
    """Import what this process is to have.

    Args:
        started: the variables that it was started with.
        before: the warm process that it was forked from, if it was.
    """
    front = replacing(started, os.getcwd())
    path = before.path if before else [entry for entry in sys.path if entry not in front]
    with inherit.low_numbers_taken():
        already = inherit.open_descriptors()
        changed, looked_for = preload.load()
        opened = sorted(inherit.open_descriptors() - already)
    read = counting(looked_for.union(before.read if before else ()))
    sys.stdout.flush()
    sys.stderr.flush()
    return Warm(
        environment=counted(started, read),
        read=read,
        imported=(before.imported if before else {}) | counted(changed),
        modules=sorted({name.partition(".")[0] for name in sys.modules} - {"support"}),
        front=front,
        path=path,
        added_path=[entry for entry in sys.path if entry not in path and entry not in front],
        descriptors=[*(before.descriptors if before else ()), *opened],
    )


def serve(control: socket.socket, warm: Warm) -> tuple[Launch, Client | None]:
    """Fork what is asked for until nobody can ask any more. Returns in forked processes only: with the warm process of
    the new one, or None where that is to be a warm process itself."""
    while (request := channel.receive(control)) is not None:
        launch, received = Launch.decode(request[0]), request[1]
        here, there = socket.socketpair()
        between = os.fork()
        if between:
            there.close()
            _close(received)
            channel.send(control, _answer(between, here))
            here.close()
            continue
        if os.fork():
            os._exit(0)
        here.close()
        control.close()
        try:
            inherit.adopted(there, launch)
            client = None
            if not boots(launch):
                mine, control = socket.socketpair()
                if not os.fork():
                    mine.close()
                    there.close()
                    _close(received)
                    continue
                control.close()
                (mine,) = inherit.make_way(launch, mine)
                client = Client(mine, warm)
            (there,) = inherit.make_way(launch, there)
            inherit.settle(launch, received)
            channel.send(there, marshal.dumps(os.getpid()))
            there.close()
        except BaseException:
            channel.send(there, marshal.dumps(traceback.format_exc()))
            os._exit(1)
        return launch, client
    os._exit(0)


def _answer(between: int, here: socket.socket) -> bytes:
    """What the new process has to say, its process id or its fault, after the process in between has ended."""
    os.waitpid(between, 0)
    try:
        channel.send(here, b"")
        answer = channel.receive(here)
    except OSError:
        answer = None
    return answer[0] if answer else marshal.dumps("the new process died before it began")


def _close(descriptors: list[int]) -> None:
    for number in descriptors:
        os.close(number)
