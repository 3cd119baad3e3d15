"""Command-line flags: adds ``int2`` to --kv-cache-dtype and the flag --kv-cache-quant-group-size.

SGLang derives its command line from the annotations of the ServerArgs dataclass, so that is what changes here;
everything then works alike for launch_server, ``sglang serve`` and ``Engine(...)``. ServerArgs reaches worker
processes by pickling its __dict__, which carries the new field along.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Optional, get_args, get_type_hints

from sglang_oscar.names import DTYPE, GROUP_SIZE


def install() -> None:
    """Extend ServerArgs; harmless when done twice.

    Raises:
        RuntimeError: ServerArgs does not look as in the SGLang release this was written for.
    """
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    if GROUP_SIZE in ServerArgs.__dataclass_fields__:
        return
    _add_dtype_choice(ServerArgs, arg_utils)
    _add_group_size_field(ServerArgs, arg_utils)
    # Both functions memoize what they read from the annotations.
    arg_utils.namespace_of.cache_clear()
    arg_utils.resolvable_fields.cache_clear()


def _add_dtype_choice(server_args: Any, arg_utils: Any) -> None:
    hint = get_type_hints(server_args, include_extras=True)["kv_cache_dtype"]
    inner, *extras = get_args(hint)
    position = next((i for i, extra in enumerate(extras) if isinstance(extra, arg_utils.Arg)), None)
    if position is None or not extras[position].choices:
        raise RuntimeError("ServerArgs.kv_cache_dtype has no list of choices to extend")
    arg = extras[position]
    extras[position] = dataclasses.replace(
        arg,
        choices=[*arg.choices, DTYPE],
        help=f'{arg.help} "int2" stores history in 2 bits (sglang-oscar plugin).',
    )
    server_args.__annotations__["kv_cache_dtype"] = Annotated[(inner, *extras)]


def _add_group_size_field(server_args: Any, arg_utils: Any) -> None:
    arg = arg_utils.Arg(
        help="Channels of head_dim that share a scale and a zero point with --kv-cache-dtype int2: a power of two "
        "from 32 to head_dim. Default: 128, or head_dim where that is smaller."
    )
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
