"""Attention: the backend, which kernels it takes, and what these take of the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.attach.feature import Feature, features
from sglang_oscar.attach.touchpoint import AROUND, SRT, Touchpoint, at
from sglang_oscar.attention import decode_choice, extend_choice, refill_pass
from sglang_oscar.attention.decode_workspace import decode_workspace, without_rows
from sglang_oscar.attention.query_heads import query_heads
from sglang_oscar.memory.part import Part, Sizing
from sglang_oscar.settings import Settings
from sglang_oscar.worker import of_this_process


def check(args: Any, settings: Settings, model: Any) -> None:
    """Refuse kernels that are asked for and cannot be had.

    Raises:
        Int2Error: naming the variable.
    """
    decode_choice.check(settings.decode_backend, args.device)
    heads = (model.head_dim, model.v_head_dim)
    extend_choice.choose(settings.extend_backend, args.device, heads, model.has_attention_sinks)


def prepare_worker(model: Any) -> None:
    """Make the backend known to SGLang."""
    from sglang_oscar.attention import backend

    backend.register()


def parts(sizing: Sizing) -> list[Part]:
    """Workspaces of prompts and of decode; none where torch computes.

    Raises:
        Int2Error: the kernel that is asked for cannot be had.
    """
    from sglang.srt.runtime_context import get_parallel

    configurator, geometry, settings = sizing.configurator, sizing.geometry, of_this_process()
    if configurator.device != "cuda":
        return []
    model, ranks = configurator.model_config, get_parallel().attn_tp_size
    layer, q_heads = geometry.any_layer, query_heads(configurator.model, geometry.formats)
    found: list[Part] = []
    heads = (layer.head_dim, layer.value_head_dim)
    chosen = extend_choice.choose(settings.extend_backend, configurator.device, heads, model.has_attention_sinks)
    if chosen is not None and chosen != "triton":
        found.append(extend_choice.workspace(chosen, layer, q_heads, model.dtype, sizing.budget_bytes))
    drafts = new_tokens(releases.resolved(configurator.server_args))
    kinds = without_rows(geometry, configurator.device)
    task = decode_choice.DecodeTask(
        settings.decode_backend, kinds, configurator.page_size, q_heads, model.dtype, bool(found), drafts,
        kv_heads=layer.kv_heads,
    )  # fmt: skip
    return [*found, decode_workspace(task, geometry.formats, model.context_len, ranks)]


def around_wrapper(original: Callable[[Any, Any], Any], runner: Any, full_attn_backend: Any) -> Any:
    """Let rooms put other attention beside that of layers that attend to everything."""
    for feature in features():
        original = partial(feature.wraps_attention, original)
    return original(runner, full_attn_backend)


FEATURE = Feature(
    name="attention",
    in_schedulers=[
        Touchpoint(
            at(SRT + "model_executor.model_runner.ModelRunner.forward"), AROUND, refill_pass.around_model_forward
        ),
        Touchpoint(at(SRT + "layers.attention.attention_registry.attn_backend_wrapper"), AROUND, around_wrapper),
    ],
    check=check,
    prepare_worker=prepare_worker,
    parts=parts,
)
