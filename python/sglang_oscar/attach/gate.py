"""The gate: everything that can be decided before a model is loaded is decided here, in the launching process.

Runs around SGLang's own resolution of arguments: fills in what int2 mode needs, lets SGLang resolve the rest, then
refuses what cannot work. On the command line a refusal is one line and exit status 78; ``Engine(...)`` gets an
Int2Error. What it lets through it marks, and a worker takes no arguments without the mark: a hook may attach and never
be called, and then nothing would have been refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_oscar.attach import failure, known_arguments, processes, refusals, releases
from sglang_oscar.attach.feature import OfAnyServer, features
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.names import BACKEND, DEFAULT_PAGE_SIZE, GROUP_SIZE, is_int2
from sglang_oscar.settings import WITHOUT_EFFECT, Settings

logger = logging.getLogger(__name__)
COMMAND_LINE, PASSED = "_oscar_command_line", "_oscar_passed"
"""Marks in the ``__dict__`` of server arguments, which no release seals and which is pickled to workers."""
UNCHECKED = (
    "int2 mode cannot attach to SGLang: these server arguments passed none of its checks; make them after "
    "load_plugins() and do not copy them, or use --kv-cache-dtype auto"
)


def around_prepare_server_args(original: Callable[..., Any], argv: list[str]) -> Any:
    """Command line: turn a refusal into one line and an exit status, also where arguments are resolved only later."""
    try:
        server_args = original(argv)
    except Int2Error as error:
        fatal(error)
    if is_int2(server_args) or getattr(server_args, GROUP_SIZE) is not None or wanted_anyway():
        server_args.__dict__[COMMAND_LINE] = True
    return server_args


def around_resolution(original: Callable[..., None], self: Any) -> None:
    """Configure and check int2 mode around SGLang's own resolution of arguments.

    Raises:
        Int2Error: int2 mode cannot run like this, and the arguments are not those of a command line.
    """
    if releases.is_resolved(self):
        return original(self)
    try:
        resolve(original, self)
    except Int2Error as error:
        if COMMAND_LINE in self.__dict__:
            fatal(error)
        raise


def before_resolution_of_taken_name(self: Any) -> None:
    """Where SGLang itself has an int2: nobody is served it who believes that it is this plugin's.

    Raises:
        Int2Error: it is asked for.
    """
    if is_int2(self):
        raise Int2Error(f"int2 mode cannot attach to SGLang: {failure.reason()}")


def resolve(original: Callable[..., None], self: Any) -> None:
    """Resolve arguments that are as the operator gave them.

    Raises:
        Int2Error: int2 mode cannot run like this.
    """
    processes.declare(is_int2(self))
    for work in wanted_anyway():
        work.configure(self)
    if not is_int2(self):
        if getattr(self, GROUP_SIZE) is not None:
            raise Int2Error("--kv-cache-quant-group-size needs --kv-cache-dtype int2")
        for work in wanted_anyway():
            if (reason := failure.reason()) is not None:
                raise Int2Error(f"{work.what} cannot attach to SGLang: {reason}")
        original(self)
        for work in wanted_anyway():
            work.check(releases.resolved(self), releases.model_config(self))
        return
    if (reason := failure.reason()) is not None:
        raise Int2Error(f"int2 mode cannot attach to SGLang: {reason}")
    if (release := failure.newer_release()) is not None:
        logger.warning("int2 mode: sglang %s is newer than what was tested, %s", release, failure.supported())
    settings = Settings.from_env()
    # These come again after SGLang's own resolution, which stops at some with a traceback and switches others on.
    refusals.check_arguments(self)
    untried = known_arguments.untried(self)
    configure(self, settings, check_model_early(self))
    noted = {feature.name: feature.before_resolution(self) for feature in features()}
    original(self)
    args, model = releases.resolved(self), releases.model_config(self)
    check(args, settings, model)
    # Last of all: it may take minutes.
    for feature in features():
        settings = feature.settle(self, settings, model, noted[feature.name])
    logger.info("int2 settings: %s", " ".join(settings.lines()))
    for name in sorted(WITHOUT_EFFECT.keys() & os.environ.keys()):
        logger.warning("int2 mode: %s has no effect: %s", name, WITHOUT_EFFECT[name])
    if untried:
        logger.warning("int2 mode: untried arguments: %s", ", ".join(untried))
    self.__dict__[PASSED] = True


def wanted_anyway() -> list[OfAnyServer]:
    """What this process is asked to do for servers of any mode."""
    found = [feature.any_server for feature in features() if feature.any_server is not None]
    return [work for work in found if work.wanted()]


def has_passed(server_args: Any) -> bool:
    """Whether server arguments were let through, here or in the process that launched this one."""
    return PASSED in server_args.__dict__


def before_check_server_args(self: Any) -> None:
    """Second chance: arguments that were resolved before plugins were loaded pass through here, in the process that
    launches the server. So does ``launch_server(server_args)`` of trainers, which resolves first and then loads."""
    if is_int2(self):
        try:
            if not has_passed(self) and not _resolve_again(self):
                raise Int2Error(UNCHECKED)
            refusals.check_arguments(releases.resolved(self))
        except Int2Error as error:
            if COMMAND_LINE in self.__dict__:
                fatal(error)
            raise


def _resolve_again(self: Any) -> bool:
    """Resolve from what the operator asked for, as if that had not been done; whether the release keeps it, and so can.

    Raises:
        Int2Error: int2 mode cannot run like this.
    """
    asked = getattr(self, "_raw_input", None)
    if asked is None:
        return False
    again = type(self)(**asked)
    again.__dict__[GROUP_SIZE] = getattr(self, GROUP_SIZE)
    again.resolve_once()
    for name in asked:
        releases.write(self, name, getattr(again, name))
    self.__dict__.update(again.__dict__)
    return True


def check_sink(tokens: int) -> None:
    """Refuse a sink window that no page ends at.

    Raises:
        Int2Error: no power of two.
    """
    if tokens & (tokens - 1):
        raise Int2Error(
            f"SGLANG_MIXED_KV_PREFIX_TOKENS={tokens}: must be 0 or a power of two, because pages are powers of two"
        )


def configure(args: Any, settings: Settings, model: Any = None) -> None:
    """Set the arguments that int2 mode decides: attention backends, page size, how a draft model drafts.

    Args:
        args: server arguments as the operator gave them; they are written.
        settings: of int2 mode.
        model: SGLang's ModelConfig; None where it cannot be read.

    Raises:
        Int2Error: page size and sink window do not fit together.
    """
    if model is None or not any(feature.attends(model) for feature in features()):
        _configure_backends(args)
    for feature in features():
        feature.configure(args, model)
    check_sink(sink := settings.windows.sink)
    if args.page_size is None:
        args.page_size = max(DEFAULT_PAGE_SIZE, sink)
    page_size = args.page_size
    if page_size < 16 or page_size & (page_size - 1):
        raise Int2Error(f"--page-size {page_size}: int2 mode needs a power of two of at least 16; 64 is the default")
    if sink > page_size:
        # Cached prefixes come in pages: only then does every prefix hit cover the whole sink window.
        raise Int2Error(
            f"--page-size {page_size} is smaller than SGLANG_MIXED_KV_PREFIX_TOKENS={sink}; "
            f"set --page-size {max(DEFAULT_PAGE_SIZE, sink)} or a smaller sink window"
        )


def _configure_backends(args: Any) -> None:
    backends = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    given = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in backends if getattr(args, name)]
    if {getattr(args, name) for name in backends} - {None, BACKEND}:
        logger.warning("int2 mode brings its own attention backend and does not use %s", ", ".join(given))
    args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend = BACKEND, None, None


def check_model_early(args: Any) -> Any:
    """Refuse a model before SGLang looks for an attention backend that suits it, and fails to find one.

    Returns:
        SGLang's ModelConfig; None where it cannot be read.

    Raises:
        Int2Error: naming the model and the feature.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        model = ModelConfig.from_server_args(args)
    except Exception:  # an unreadable model is SGLang's to report, in its own words
        return None
    refusals.check_model(model, args)
    return model


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse what cannot work, whatever the rotations.

    Args:
        args: server arguments as SGLang resolved them.
        settings: of int2 mode.
        model: SGLang's ModelConfig.

    Raises:
        Int2Error: naming the flag or variable at fault.
    """
    if not is_int2(args):
        raise Int2Error(
            f"SGLang insists on --kv-cache-dtype {args.kv_cache_dtype} for this model; drop --kv-cache-dtype int2"
        )
    refusals.check_arguments(args)
    if args.chunked_prefill_size > 0 and args.chunked_prefill_size % args.page_size:
        raise Int2Error(
            f"--chunked-prefill-size {args.chunked_prefill_size} is not a multiple of --page-size {args.page_size}; "
            f"set --chunked-prefill-size {-(-args.chunked_prefill_size // args.page_size) * args.page_size}"
        )
    refusals.check_model(model, args)
    check_device(args.device)
    if args.device == "cuda" and model.dtype not in (torch.bfloat16, torch.float16):
        raise Int2Error(f"int2 mode computes in 16 bits on a GPU, the model in {model.dtype}; set --dtype bfloat16")
    if args.attention_backend != BACKEND and not any(feature.attends(model) for feature in features()):
        raise Int2Error(
            f"SGLang insists on attention backend {args.attention_backend} for this model; use --kv-cache-dtype auto"
        )
    for feature in features():
        feature.check(args, settings, model)


def check_device(device: str) -> None:
    """Refuse devices without kernels.

    Raises:
        Int2Error: neither a CPU nor an NVIDIA GPU of compute capability 8.0 or later.
    """
    if device not in ("cuda", "cpu"):
        raise Int2Error(f"--device {device}: int2 mode runs on cuda and, for tests, on cpu")
    if device == "cuda":
        if torch.version.cuda is None:
            raise Int2Error("int2 mode needs an NVIDIA GPU; this PyTorch is built for another platform")
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            raise Int2Error("int2 mode needs a GPU of compute capability 8.0 (Ampere) or later")
