"""Command-line flags: adds ``int2`` to --kv-cache-dtype and the flag --kv-cache-quant-group-size.

SGLang derives its command line from the annotations of ServerArgs, so that is what changes here; everything then works
alike for launch_server, ``sglang serve`` and ``Engine(...)``. Where ServerArgs is a dataclass it gets a field more. A
msgspec.Struct cannot get one, but its records have a ``__dict__``: the group size lives there. Both reach worker
processes, because a record is pickled with its __dict__.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import sys
from collections.abc import Callable
from typing import Annotated, Any, Optional, get_args, get_type_hints

from sglang_oscar.names import DEFAULT_PAGE_SIZE, DTYPE, GROUP_SIZE

FLAG = f"--{GROUP_SIZE.replace('_', '-')}"
HELP = (
    "Channels of head_dim that share a scale and a zero point with --kv-cache-dtype int2: a power of two from 32 that "
    "divides head_dim. Default: the largest up to 128."
)
DTYPE_HELP = f'"{DTYPE}" stores history in 2 to 4 bits (sglang-oscar plugin).'
RING = "a ring and two sink blocks"
MEANINGS = {
    f"--kv-cache-dtype {DTYPE}": DTYPE_HELP,
    FLAG: HELP,
    "--page-size": "Tokens per page: a power of two of at least 16, no less than the sink. "
    f"Default: {DEFAULT_PAGE_SIZE}, or the sink where that is larger.",
    "--max-running-requests": f"Each request has {RING}. Default: what takes a fifth of the KV budget, at most 256.",
    "--attention-backend": "Replaced by int2 mode's own; with windows that of their layers (triton).",
    "--enable-torch-compile": "On a GPU, with full CUDA graphs of decode steps; compiles every batch size up to "
    "--torch-compile-max-bs.",
    "--speculative-algorithm": "NGRAM, or a draft model: EAGLE, EAGLE3, NEXTN (chains, by default of 3; their cache is "
    "not quantized, but halved by --speculative-draft-kv-cache-dtype fp8_e4m3). At most 64 tokens a step, each a "
    "token more in every ring.",
    "--speculative-draft-attention-backend": "Default: fa3 on Hopper, else flashinfer where it is installed, else "
    "triton.",
    "--enable-hierarchical-cache": "Rows in host memory, too, outside of --mem-fraction-static; SGLang wants 10 GiB of "
    "it left over.",
    "--hicache-storage-backend": "Pages in storage: file, nixl, mooncake, hf3fs. Only files have run on GPUs.",
    "--disaggregation-mode": "prefill or decode, by mooncake, mooncake_tcp or nixl. Both servers need the same "
    "rotations, windows, drafts, page size and number of ranks.",
    "--disaggregation-decode-extra-slots": f"Requests that wait for their prompts; each has {RING}.",
    "--mamba-full-memory-ratio": "Hybrid models: memory of states over memory of the cache. Default: 0.9 times the "
    "bytes of a token in 16 bits over those here.",
    "--swa-full-tokens-ratio": "If left out, windows are sized by --max-running-requests and --chunked-prefill-size.",
}
"""Flags that int2 mode adds, or whose default or meaning it changes, for docs/reference.md."""


class NameTakenError(RuntimeError):
    """SGLang itself has a choice of our name."""


def name_is_taken() -> bool:
    """Whether SGLang itself has a choice of our name, for :func:`install` has not run yet; False where nobody can tell
    in this release."""
    try:
        from sglang.srt.arg_groups import arg_utils
        from sglang.srt.server_args import ServerArgs

        _, extras, position = _dtype_annotation(ServerArgs, arg_utils)
    except Exception:
        return False
    return DTYPE in extras[position].choices and not hasattr(ServerArgs, GROUP_SIZE)


def install() -> None:
    """Extend ServerArgs; harmless when done twice.

    Raises:
        NameTakenError: it has a choice of our name already, which would be taken over.
        RuntimeError: ServerArgs does not look as in the SGLang releases this was written for.
    """
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    if hasattr(ServerArgs, GROUP_SIZE):
        return
    if name_is_taken():
        raise NameTakenError
    if not dataclasses.is_dataclass(ServerArgs):
        return _install_on_struct(ServerArgs, arg_utils)
    _add_dtype_choice(ServerArgs, arg_utils)
    _add_group_size_field(ServerArgs, arg_utils)
    # Both functions memoize what they read from the annotations.
    arg_utils.namespace_of.cache_clear()
    arg_utils.resolvable_fields.cache_clear()


def _dtype_annotation(server_args: Any, arg_utils: Any) -> tuple[Any, list[Any], int]:
    """The type of kv_cache_dtype, what is annotated to it, and the place of SGLang's Arg among that.

    Raises:
        RuntimeError: there is none, or it has no list of choices.
    """
    hint = get_type_hints(server_args, include_extras=True)["kv_cache_dtype"]
    inner, *extras = get_args(hint)
    position = next((i for i, extra in enumerate(extras) if isinstance(extra, arg_utils.Arg)), None)
    if position is None or not isinstance(extras[position].choices, list):
        raise RuntimeError("ServerArgs.kv_cache_dtype has no list of choices to extend")
    return inner, extras, position


def _add_dtype_choice(server_args: Any, arg_utils: Any) -> None:
    inner, extras, position = _dtype_annotation(server_args, arg_utils)
    arg = extras[position]
    extras[position] = dataclasses.replace(arg, choices=[*arg.choices, DTYPE], help=f"{arg.help} {DTYPE_HELP}")
    server_args.__annotations__["kv_cache_dtype"] = Annotated[(inner, *extras)]


def _add_group_size_field(server_args: Any, arg_utils: Any) -> None:
    arg = arg_utils.Arg(help=HELP)
    hint = Annotated[Optional[int], arg, arg_utils.NS("model")]  # noqa: UP045 - SGLang unwraps typing.Optional
    field = dataclasses.field(default=None)
    field.name, field.type = GROUP_SIZE, hint  # type: ignore[attr-defined]
    field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    field.kw_only = False  # type: ignore[attr-defined]
    server_args.__annotations__[GROUP_SIZE] = hint
    server_args.__dataclass_fields__[GROUP_SIZE] = field
    setattr(server_args, GROUP_SIZE, None)
    original = server_args.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, GROUP_SIZE, kwargs.pop(GROUP_SIZE, None))
        original(self, *args, **kwargs)

    server_args.__init__ = init


def _install_on_struct(server_args: Any, arg_utils: Any) -> None:
    _, extras, position = _dtype_annotation(server_args, arg_utils)
    add_cli_args, from_cli_args = server_args.add_cli_args, server_args.from_cli_args

    @functools.wraps(add_cli_args)
    def add(parser: Any) -> None:
        add_cli_args(parser)
        parser.add_argument(FLAG, type=int, default=None, help=HELP)

    @functools.wraps(from_cli_args)
    def made(cls: Any, args: Any) -> Any:
        record = from_cli_args(args)
        record.__dict__[GROUP_SIZE] = getattr(args, GROUP_SIZE, None)
        return record

    # The Arg cannot be replaced, as annotations of a Struct were read when it was made; its list is an ordinary one.
    extras[position].choices.append(DTYPE)
    server_args.add_cli_args, server_args.from_cli_args = staticmethod(add), classmethod(made)
    setattr(server_args, GROUP_SIZE, None)
    engine = "sglang.srt.entrypoints.engine"
    # A worker makes no Engine, and should not pay for the import.
    if engine in sys.modules or multiprocessing.parent_process() is None:
        from sglang.srt.entrypoints.engine import Engine

        Engine.server_args_class = staticmethod(_with_group_size(server_args))


def _with_group_size(server_args: Any) -> Callable[..., Any]:
    """What ``Engine(...)`` makes its server arguments with: the group size is no argument of a Struct."""

    def make(**kwargs: Any) -> Any:
        size = kwargs.pop(GROUP_SIZE, None)
        record = server_args(**kwargs)
        record.__dict__[GROUP_SIZE] = size
        return record

    return make
