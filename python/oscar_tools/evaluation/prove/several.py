"""All caches of a run, one after the other or several at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
import typer

from oscar_rotation.errors import DumpError, RotationFileError
from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.caches import Cache
from oscar_tools.evaluation.prove.run import Prover
from oscar_tools.local_server import ServerFailedError
from sglang_oscar.errors import Int2Error

Makers = Mapping[str, Callable[[], Cache]]
"""Name of a cache -> what makes it, in the order in which caches are asked; INT2 is fitted when its turn comes."""


def ask_all(prover: Prover, makers: Makers) -> list[Cache]:
    """Make and ask all caches, BF16 first; what cannot be made becomes a remark.

    With several servers at a time caches are made here while others are asked; each measure waits for BF16's answers.

    Returns:
        the caches that could be made, in order.

    Raises:
        ProveError: the BF16 cache could not be asked.
        KeyboardInterrupt: the user interrupted; all servers are ended.
    """
    several = prover.proof.servers > 1
    asked: list[Cache] = []
    waiting: list[Future[None]] = []
    with ThreadPoolExecutor(prover.proof.servers) as pool:
        try:
            for name, make in makers.items():
                for future in waiting:
                    if future.done():
                        future.result()
                if (cache := _made(prover, name, make)) is None:
                    continue
                asked.append(cache)
                prover.open(cache)
                if several:
                    waiting.append(pool.submit(prover.ask, cache))
                else:
                    prover.ask(cache)
            _finish(prover, waiting)
        except BaseException:
            prover.give_up()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return asked


def _finish(prover: Prover, waiting: list[Future[None]]) -> None:
    """Wait for all: what goes wrong with one cache does not end the others, without BF16 none goes on."""
    if waiting and waiting[0].exception() is not None:
        prover.give_up()
    wait(waiting)
    for future in waiting:
        future.result()


def _made(prover: Prover, name: str, make: Callable[[], Cache]) -> Cache | None:
    try:
        return make()
    except (DataError, DumpError, Int2Error, RotationFileError, ServerFailedError) as error:
        # The first line is the fault; of a dumping server that ended, its log follows.
        fault = str(error).splitlines()[0]
    except torch.OutOfMemoryError:
        fault = f"the GPU has no memory for a fit beside {prover.proof.servers} servers; ask fewer with --servers"
    text = f"{name}: left out, {fault}"
    prover.outcome.remark(text, failed=True)
    typer.echo(text, err=True)
    return None
