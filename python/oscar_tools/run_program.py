"""``oscar run MODULE ARGUMENTS``: a program of SGLang that takes server arguments and loads no plugins itself."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sglang_oscar.errors import Int2Error, fatal

ONE_BATCH = "sglang.benchmark.one_batch"
"""The program that runs a model without a scheduler, in its own process or in one of its own for every rank."""
WORK = ("latency_test", "correctness_test")
"""What it does there; the first argument is SGLang's ServerArgs."""

_stock: dict[str, Callable[..., Any]] = {}


def run(
    context: typer.Context,
    module: Annotated[str, typer.Argument(help="Such as sglang.benchmark.one_batch.")],
) -> None:
    """Run a program of SGLang with plugins, so that it takes --kv-cache-dtype int2.

    SGLang's benchmarks other than sglang.benchmark.serving make servers or engines themselves and load no plugins:
    without this command they do not know int2. Arguments behind MODULE are the program's.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as error:
        fatal(f"oscar run: {error}")
    if not callable(main := getattr(program, "cli_main", None)):
        fatal(f"oscar run: {module} has no function cli_main; programs of SGLang under sglang.benchmark have one")
    if ONE_BATCH in sys.modules:
        one_batch = sys.modules[ONE_BATCH]
        for name in WORK:
            _stock[name] = getattr(one_batch, name)
            setattr(one_batch, name, functools.partial(work, name))
    sys.argv = [module, *context.args]
    try:
        main()
    except Int2Error as error:
        fatal(error)


def work(name: str, server_args: Any, *rest: Any) -> Any:
    """What :data:`ONE_BATCH` does with a model, in a process that has hooked what a scheduler has.

    Args:
        name: one of :data:`WORK`.
        server_args: SGLang's ServerArgs.
        rest: what else the program passes.
    """
    from sglang.srt.plugins import load_plugins

    from sglang_oscar import plugin

    load_plugins()
    plugin.hook_models(server_args)
    # A process of a rank has imported the program anew.
    return (_stock.get(name) or getattr(importlib.import_module(ONE_BATCH), name))(server_args, *rest)
