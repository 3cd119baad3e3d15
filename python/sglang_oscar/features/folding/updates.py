"""Weights that change or leave while a server runs: what would no longer match the value rotation is refused.

Projections that have absorbed the rotation (:mod:`sglang_oscar.features.folding.absorption`) cannot be mixed with plain
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oscar.errors import Int2Error
from sglang_oscar.features.folding import absorption
from sglang_oscar.formats.origin import is_kept, note_updated
from sglang_oscar.formats.rotations import IDENTITY
from sglang_oscar.memory.cache import Int2Cache, cache_of
from sglang_oscar.settings import active

FROM_DISK_ONLY = (
    "int2 mode updates weights from disk only (POST /update_weights_from_disk), "
    "where the value rotation is absorbed again"
)
NOT_EXPORTED = (
    "int2 mode does not hand out weights, which may have absorbed the value rotation; "
    "take them from a server without it"
)


def _answering(reason: str) -> Callable[..., Any]:
    """A hook that refuses in int2 mode, before the worker unpacks what it was sent or waits for others."""

    def around(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if active() is None else (False, reason)

    return around


around_update_weights = _answering(FROM_DISK_ONLY)
"""Partial updates from memory would overwrite absorbed projections with plain ones."""
around_send_weights = _answering(NOT_EXPORTED)
"""Weights that are sent may have absorbed the rotation, which their receiver would not know."""


def around_update_from_tensor(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Refuse before a draft model gets what the model must not: some releases hand weights to both behind our hooks."""
    if active() is None:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    return UpdateWeightsFromTensorReqOutput(success=False, message=FROM_DISK_ONLY)


def around_begin_update(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Refuse a session of partial updates, before any rank changes its weights or waits for another."""
    if active() is None:
        return original(self, recv_req)
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    return BeginWeightUpdateReqOutput(success=False, message=FROM_DISK_ONLY)


def around_update_from_disk(
    original: Callable[..., Any], self: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any
) -> Any:
    """Refuse what would be read without absorbing, or absorbed where values are rotated at every step."""
    runner = self.get_model_runner()
    if runner.is_draft_worker:
        with absorption.as_they_are():
            return original(self, model_path, load_format, *args, **kwargs)
    cache = cache_of(runner.token_to_kv_pool)
    if cache is not None and (reason := reload_obstacle(cache, runner, load_format)) is not None:
        return False, reason
    before = absorption.loads()
    try:
        return original(self, model_path, load_format, *args, **kwargs)
    finally:
        # Not by success alone: SGLang undoes an update that breaks off by reading the new path once more.
        if absorption.loads() > before:
            note_updated()


def reload_obstacle(cache: Int2Cache, model_runner: Any, load_format: str) -> str | None:
    """Why weights read in this format would not fit the running server, or None."""
    if is_kept():
        return (
            "--hicache-storage-backend keeps what the old weights have computed under keys that do not tell weights "
            "apart; start a server on the new ones"
        )
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    loader = type(get_model_loader(LoadConfig(load_format=load_format), model_runner.model_config))
    hooked = DefaultModelLoader.load_weights_and_postprocess
    if getattr(loader, "load_weights_and_postprocess", None) is not hooked:
        return f"int2 mode cannot absorb the value rotation into weights of load_format {load_format}; use auto"
    absorbs = cache.settings.absorb_v_rotation and cache.settings.v_rotation != IDENTITY
    absorbs &= absorption.obstacle(model_runner.model, list(absorption.attention_layers(model_runner.model))) is None
    if absorbs and any(layer.format.value.transform.matrix is not None for layer in cache.layers.values()):
        return (
            f"the weights of --load-format {model_runner.server_args.load_format} have not absorbed the value "
            "rotation, which weights from disk would; start a server on the new ones"
        )
    return None


def around_save_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse to save weights.

    Raises:
        Int2Error: in int2 mode; SGLang reports it to the caller.
    """
    if active() is not None:
        raise Int2Error(NOT_EXPORTED)
    return original(self, *args, **kwargs)
