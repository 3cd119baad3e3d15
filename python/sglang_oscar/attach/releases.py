"""What differs between the supported releases of SGLang: told by what is there, never by a version number.

The rest of the package asks here and reads like code for one release. What moved to another place but kept its meaning
is a row with several targets in :mod:`sglang_oscar.attach.touchpoints`.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _function(module: str, name: str) -> Any:
    """A function of SGLang, or None in releases that lack it or its module."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise


def exists(target: str) -> bool:
    """Whether a dotted name is there in the installed release, in a module that can be imported."""
    try:
        pkgutil.resolve_name(target)
    except AttributeError:
        return False
    return True


def first_existing(targets: Sequence[str]) -> str | None:
    """The first of several dotted names that the installed release has, or None."""
    return next((target for target in targets if exists(target)), None)


# Server arguments. SGLang used to resolve them while the record was made and to keep the result in it. Newer releases
# resolve in a step of its own; the record then keeps what the operator asked for, and a view says what was decided.


def is_resolved(server_args: Any) -> bool:
    """Whether a record has been resolved in a step of its own, as in every worker; False where there is no such step.

    Args:
        server_args: SGLang's ServerArgs.
    """
    return bool(getattr(server_args, "_resolution_finished", False))


def resolved(server_args: Any) -> Any:
    """Server arguments as SGLang decided them, to read from.

    Args:
        server_args: SGLang's ServerArgs.
    """
    view = _function("sglang.srt.arg_groups.model_override_base", "resolving_view")
    return server_args if view is None else view(server_args)


def model_config(server_args: Any) -> Any:
    """SGLang's ModelConfig of server arguments, kept on the record.

    Args:
        server_args: SGLang's ServerArgs.
    """
    of = _function("sglang.srt.arg_groups.model_override_base", "model_config_of")
    return server_args.get_model_config() if of is None else of(server_args)


def switched_on(variable: str) -> bool:
    """Whether a variable of SGLang's environment that is a switch is on; not in a release that has no such switch.

    Args:
        variable: its name.
    """
    from sglang.srt.environ import envs

    switch = getattr(envs, variable, None)
    return switch is not None and bool(switch.get())


def argument(server_args: Any, name: str, absent: Any) -> Any:
    """A server argument that not all releases have.

    Args:
        server_args: SGLang's ServerArgs.
        name: of the field.
        absent: what to answer where the release has no such field, and so cannot do what it asks for.
    """
    return getattr(server_args, name, absent)


def write(server_args: Any, name: str, value: Any) -> None:
    """Write a server argument while SGLang resolves them: newer releases seal the record meanwhile.

    Args:
        server_args: SGLang's ServerArgs.
        name: of the field.
        value: to be read from it.
    """
    import msgspec

    setter = msgspec.Struct.__setattr__ if isinstance(server_args, msgspec.Struct) else setattr
    setter(server_args, name, value)


def field_defaults(record: type) -> dict[str, Any]:
    """Defaults of the fields of ServerArgs by name; a field without one has whatever its library calls missing."""
    import dataclasses

    import msgspec

    of = dataclasses.fields if dataclasses.is_dataclass(record) else msgspec.structs.fields
    absent = (dataclasses.MISSING, msgspec.NODEFAULT)
    return {
        field.name: field.default if field.default_factory in absent else field.default_factory()
        for field in of(record)
    }


def differs_from_default(server_args: Any, name: str) -> bool:
    """Whether a server argument says something else than its release does by default; not where there is none.

    For arguments whose default is off in every release, by other values.

    Args:
        server_args: SGLang's ServerArgs.
        name: of the field.
    """
    from sglang.srt.server_args import ServerArgs

    default = field_defaults(ServerArgs).get(name)
    return bool(argument(server_args, name, default) != default)


def window_ratio(server_args: Any) -> float | None:
    """What the operator says of the size of the pool of sliding windows; None where that is left to SGLang.

    Older releases cannot tell their default from the same number on the command line.

    Args:
        server_args: SGLang's ServerArgs, resolved.
    """
    ratio: float | None = server_args.swa_full_tokens_ratio
    given = getattr(server_args, "_swa_full_tokens_ratio_explicitly_set", None)
    if given is None:
        given = differs_from_default(server_args, "swa_full_tokens_ratio")
    return ratio if given else None


# Requests. A request's seat and how far it is computed moved from the request to what it holds of the cache.


def seat(req: Any) -> Any:
    """The seat of a request, its number in SGLang's request pool; None while it has none."""
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def seat_of_slots(slots: Any, req_to_token: Any) -> int:
    """The seat of a request, where a release does not say it: of ``req_to_token`` [seats, max_len], ``slots`` are the
    beginning of its line, as a view."""
    assert slots.untyped_storage().data_ptr() == req_to_token.untyped_storage().data_ptr(), "a copy says no seat"
    found: int = (slots.storage_offset() - req_to_token.storage_offset()) // req_to_token.stride(0)
    return found


def committed_tokens(req: Any) -> int:
    """Tokens of a request whose keys and values are computed."""
    tokens: int = req.kv_committed_len if hasattr(req, "kv_committed_len") else req.kv.kv_committed_len
    return tokens


def prefix_tokens(req: Any) -> int:
    """Tokens of a request that lie in the cache before its next chunk."""
    return len(req.prefix_indices) if hasattr(req, "prefix_indices") else int(req.prefix_len)


def go_on_behind_chunk(req: Any, req_to_token_pool: Any) -> None:
    """Let a request's next chunk begin behind this one although not all of it is shared: SGLang would compute the same
    tokens again, for ever.

    Args:
        req: SGLang's Req.
        req_to_token_pool: SGLang's request pool.
    """
    if hasattr(req, "prefix_indices"):
        req.prefix_indices = req_to_token_pool.req_to_token[seat(req), : req.extend_range.end].long()
    else:
        req.prefix_len = req.extend_end


def share_up_to(tokens: int, original: Callable[..., None], req: Any, *args: Any, **kwargs: Any) -> None:
    """Let ``original``, by which SGLang shares what is computed of a request, share its first ``tokens`` only."""
    holder = req if hasattr(req, "cache_protected_len") else req.kv
    if tokens <= holder.cache_protected_len:
        return
    name = "extend_end" if hasattr(req, "extend_end") else "extend_range"
    whole = getattr(req, name)
    setattr(req, name, tokens if name == "extend_end" else whole._replace(end=tokens))
    original(req, *args, **kwargs)
    setattr(req, name, whole)


def namespace(req: Any) -> tuple[Any, Any]:
    """What keeps cached prefixes with the same tokens apart: extra key and salt, which once was part of the key."""
    return req.extra_key, getattr(req, "cache_salt", None)


def state_source(req: Any) -> Any:
    """The state slot, int64 [1] on the device, that a hybrid model's request with a prefix hit goes on from; None where
    there is none. Asked before the request gains a seat. A state from the host comes into the request's own slot."""
    holder = req if hasattr(req, "mamba_cow_src_index") else req.kv
    if holder.mamba_cow_src_index is not None or holder.mamba_pool_idx is None:
        return holder.mamba_cow_src_index
    return holder.mamba_pool_idx.view(1)


def tells_kept_states_apart() -> bool:
    """Whether a batch remembers which of a request's two slots it kept a hybrid model's state in.

    An older release alternates them when a result arrives, by the length that a request has then. With overlap
    scheduling that may be one step ahead; where a prompt is computed in between, slots are exchanged twice for one
    state, and the prefix cache gets the other slot, which holds an older state or none.
    """
    return exists("sglang.srt.managers.schedule_batch.ScheduleBatch.mamba_track_buffer_indices")


def keeps_states_of(architecture: str) -> bool:
    """Whether the prefix cache can keep states of a hybrid class in slots of their own, as a cache of pages needs."""
    from sglang.srt.arg_groups.overrides import _MAMBA_EXTRA_BUFFER_ARCHS

    return architecture in _MAMBA_EXTRA_BUFFER_ARCHS


def finds_states_of_mamba2() -> bool:
    """Whether a state of Mamba2 is kept at the right token of a prompt that does not begin on the grid of chunks over
    all prompts of a pass; with any cache."""
    return exists("sglang.srt.layers.attention.mamba.mamba2_metadata.ForwardMetadata.track_ssm_end_locs")


def sends_states() -> bool:
    """Whether states of hybrid models go from a prefill to a decode server as they were tried to: since 0.5.23."""
    return exists("sglang.srt.disaggregation.base.conn.StateType.REQUEST_ROW")


@cache
def drafts_token_ids() -> bool:
    """Whether drafts of NGRAM are tokens of the model, also of prompts with images. Older releases draft what stands
    for an image in a prompt, a hash, and end when they embed it."""
    spec = importlib.util.find_spec("sglang.srt.speculative.ngram_worker")
    return spec is not None and "origin_input_ids_unpadded" in Path(str(spec.origin)).read_text(encoding="utf-8")


def carries_slot_states() -> bool:
    """Whether what is registered beside a hybrid model's states goes to host memory and back with them."""
    return exists("sglang.srt.mem_cache.device_pool_info.MambaStateBufferInfo.extra_checkpoint_buffers")


def tracked_tokens(forward_batch: Any) -> Any:
    """Tokens of each chunk of a hybrid model behind which SGLang keeps the state: a tensor [batch]. Anything where it
    keeps none."""
    chunk_of = _function("sglang.srt.runtime_context", "mamba_cache_chunk_size")
    if chunk_of is None:
        from sglang.srt.runtime_context import get_server_args

        chunk = get_server_args().mamba_cache_chunk_size
    else:
        chunk = chunk_of()
    return (forward_batch.mamba_track_seqlens - forward_batch.extend_prefix_lens) // chunk * chunk


def real_token_counts(forward_batch: Any) -> tuple[str, str]:
    """Fields of a ForwardBatch that count its tokens without padding: a scalar tensor or None, and an int.

    Newer releases keep the count of all tensor-parallel ranks and derive each rank's own from it.
    """
    ours = "num_token_non_padded"
    name = f"global_{ours}" if hasattr(forward_batch, f"global_{ours}") else ours
    return name, f"{name}_cpu"


def plan_writes(runner: Any, batch: Any) -> None:
    """Tell a model runner where a batch writes that SGLang has not built: newer graphs of prefills ask it."""
    if bind := getattr(getattr(runner, "kv_index_translator", None), "bind_own_plan", None):
        bind(batch)


# Machines without a GPU.


def allocates_on_cpu(allocator: Any) -> bool:
    """Whether SGLang's paged allocator itself does without Triton where there is no GPU."""
    return hasattr(allocator, "use_triton_kernels")
