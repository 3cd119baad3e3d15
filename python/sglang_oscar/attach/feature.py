"""What a room of the plugin adds to the core: each has one such record, in its ``feature.py``.

The core (attach, formats, memory, requests, attention) asks all records and imports no feature;
:func:`sglang_oscar.features.register_all` knows which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_oscar.attach.touchpoint import Touchpoint
    from sglang_oscar.settings import Settings

Refusal = tuple[Callable[[Any], bool], str]
"""Whether server arguments ask for something, and what: "--kv-cache-dtype int2 does not support <what>". The text ends
with what to change."""


def _nothing(*args: Any) -> None:
    """Where a room has nothing to say."""


def _no(*args: Any) -> bool:
    return False


@dataclass(frozen=True)
class OfAnyServer:
    """What the plugin does for servers that do not ask for int2.

    Args:
        what: the setting that asks for it, as text.
        wanted: whether this process is asked.
        configure: prepares server arguments as the operator gave them; raises Int2Error for what cannot be.
        check: refuses (resolved arguments, SGLang's ModelConfig).
        in_schedulers: hooks.
    """

    what: str
    wanted: Callable[[], bool]
    configure: Callable[[Any], None]
    check: Callable[[Any, Any], None]
    in_schedulers: Sequence[Touchpoint]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Hooks, refusals, bytes, and what is done when a server is sized and built; a room leaves out what it has not.

    Args:
        name: of the room.
        in_arguments: hooks of every process, where arguments are resolved.
        in_schedulers: hooks of schedulers in int2 mode.
        in_every_scheduler: hooks of schedulers of any mode.
        refused: server arguments that are refused.
        architectures: of models that are not plain ones and that the room serves.
        refused_with: pairs of what models of the room are called, and what ``check_model`` refuses beside them.
        refused_models: models that it refuses, a line each.
        check_model: (ModelConfig, server arguments or None) refuses models, or arguments beside them, with Int2Error.
        attends: (ModelConfig) whether the room chooses the attention backend of this model.
        configure: (arguments as the operator gave them, ModelConfig or None) fills in what is left open.
        check: (resolved arguments, settings, ModelConfig) refuses with Int2Error, before anything is loaded.
        before_resolution: (arguments as the operator gave them) notes for ``settle`` what resolution may write over.
        settle: (server arguments, settings, ModelConfig, the note) the settings from now on, once nothing else is
            refused. May take minutes.
        prepare_worker: (ModelConfig) what a worker of int2 mode needs before its cache is sized.
        cache_dtype: (ModelConfig, its dtype) what SGLang is told of the cache, where a room wants it to see another.
        parts: (:class:`sglang_oscar.memory.part.Sizing`) what the room takes of the KV budget.
        pool_sizes: (plan, tokens, page_size) fields of SGLang's MemoryPoolConfig beside the tokens of the history pool.
        wraps_attention: (SGLang's ``attn_backend_wrapper``, its ModelRunner, the attention backend of layers without a
            window or state) the attention backend of the model.
        owns: (:class:`sglang_oscar.memory.build.Built`) what requests own units of, by name
            (:class:`sglang_oscar.memory.owned.Holding`): it goes with them wherever they go.
        built: (:class:`sglang_oscar.memory.build.Built`) the pool that SGLang gets in place of the one that was built;
            None for that one.
        draft_pool_built: (draft model's pool, the model's cache) checks it.
        restores_windows: whether prefix hits of this process's server bring their recent windows along.
        covered: (request, its tokens) up to which token of a request a prefix hit brings the recent window along.
        longest_hit: (request, its tokens) up to which token of a request a prefix hit may reach.
        any_server: what it does without int2.
    """

    name: str
    in_arguments: Sequence[Touchpoint] = ()
    in_schedulers: Sequence[Touchpoint] = ()
    in_every_scheduler: Sequence[Touchpoint] = ()
    refused: Sequence[Refusal] = ()
    architectures: frozenset[str] = frozenset()
    refused_with: Sequence[tuple[str, Sequence[Refusal]]] = ()
    refused_models: Sequence[str] = ()
    check_model: Callable[[Any, Any], None] = _nothing
    attends: Callable[[Any], bool] = _no
    configure: Callable[[Any, Any], None] = _nothing
    check: Callable[[Any, Settings, Any], None] = _nothing
    before_resolution: Callable[[Any], Any] = _nothing
    settle: Callable[[Any, Settings, Any, Any], Settings] = lambda args, settings, model, note: settings
    prepare_worker: Callable[[Any], None] = _nothing
    cache_dtype: Callable[[Any, Any], tuple[str, Any] | None] = _nothing  # type: ignore[assignment]
    parts: Callable[[Any], Sequence[Any]] = lambda sizing: ()
    pool_sizes: Callable[[Any, int, int], dict[str, int]] = lambda plan, tokens, page_size: {}
    wraps_attention: Callable[[Callable[..., Any], Any, Any], Any] = lambda original, runner, backend: original(
        runner, backend
    )
    owns: Callable[[Any], dict[str, Any]] = lambda built: {}
    built: Callable[[Any], Any] = _nothing
    draft_pool_built: Callable[[Any, Any], None] = _nothing
    restores_windows: Callable[[], bool] = _no
    covered: Callable[[Any, int], int] = lambda req, input_len: 0
    longest_hit: Callable[[Any, int], int] = lambda req, input_len: input_len
    any_server: OfAnyServer | None = None


_features: list[Feature] = []


def register(feature: Feature) -> None:
    """Ask a room from now on, behind those that are registered."""
    _features.append(feature)


def features() -> Sequence[Feature]:
    """All rooms, in the order in which they are asked.

    Raises:
        RuntimeError: none is registered: refusals would be silent.
    """
    if not _features:
        raise RuntimeError("call sglang_oscar.features.register_all() first")
    return _features
