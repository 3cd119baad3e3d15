"""Absorbing the value rotation into the weights, so that it costs nothing at run time.

With v' = v R stored in the cache and o' = o R coming out of attention, the projections become
W_v' = R^T W_v (and b' = b R) per kv head and W_o' = W_o R per query head; paper, section 4. R may be one per kv head,
that of its query heads. It happens between
loading a checkpoint and SGLang's post-processing: weights are still in checkpoint layout there, and reloading weights
from disk passes the same place. Each tensor-parallel rank rotates its own shard. Weights that are quantized, in the
checkpoint or by ``--quantization``, are left alone: their values are rotated at every step.
A later load may hold some tensors only: what it does not write has the rotation already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import repeat
from typing import Any

import torch
from torch import nn

from oscar_kernels.reference import rotate
from oscar_kernels.transform import SideTransform
from sglang_oscar import names
from sglang_oscar.attach import releases
from sglang_oscar.errors import Int2Error, fatal
from sglang_oscar.features.folding.partial_loads import WatchedTensors
from sglang_oscar.formats.geometry import own_heads
from sglang_oscar.formats.origin import note_before_loading, note_loaded
from sglang_oscar.formats.rotations import IDENTITY, model_formats
from sglang_oscar.settings import Settings, of_this_process

logger = logging.getLogger(__name__)
MARK = "_oscar_absorbed_v_rotation"
_loads = 0

ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Glm4MoeForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
)
"""Models in which nothing but the identity lies between attention output and o_proj."""


_as_they_are: ContextVar[bool] = ContextVar("oscar_weights_as_they_are", default=False)


@contextmanager
def as_they_are() -> Iterator[None]:
    """While inside, loaded weights absorb nothing: those of a draft model, whose cache is not rotated."""
    token = _as_they_are.set(True)
    try:
        yield
    finally:
        _as_they_are.reset(token)


def loads() -> int:
    """How often weights of the model have begun to be read into it, by this process."""
    return _loads


def around_load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the weights of a draft model from those of the model, and note which these are."""
    from sglang.srt.runtime_context import get_server_args

    if self.is_draft_worker:
        with as_they_are():
            return original(self, *args, **kwargs)
    server_args = releases.resolved(get_server_args())
    if server_args.kv_cache_dtype != names.DTYPE:
        return original(self, *args, **kwargs)
    note_before_loading(server_args)
    result = original(self, *args, **kwargs)
    note_loaded(server_args)
    return result


def around_load_weights_and_postprocess(
    original: Callable[..., None], model: nn.Module, weights: Any, target_device: Any
) -> None:
    """Absorb right after ``model.load_weights`` and before any post-processing."""
    global _loads
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    if server_args.kv_cache_dtype != names.DTYPE or _as_they_are.get():
        return original(model, weights, target_device)
    _loads += 1
    load_weights: Any = model.load_weights

    def load_and_absorb(*args: Any, **kwargs: Any) -> Any:
        again = watched(model) if hasattr(model, MARK) else None
        try:
            loaded = load_weights(*args, **kwargs)
        finally:
            written = None if again is None else again.written()
        try:
            absorb(model, of_this_process(), written)
        except Int2Error as error:
            fatal(error)
        return loaded

    model.load_weights = load_and_absorb  # type: ignore[assignment]
    try:
        original(model, weights, target_device)
    finally:
        del model.load_weights


def is_absorbed(model: nn.Module, server_args: Any, settings: Settings) -> bool:
    """Whether the weights of a loaded model have absorbed the value rotation.

    Random weights (--load-format dummy) count as rotated already: a rotation of them is as random.
    """
    if server_args.load_format == "dummy" and settings.absorb_v_rotation:
        return obstacle(model, list(attention_layers(model))) is None
    return hasattr(model, MARK)


@torch.no_grad()
def watched(model: nn.Module) -> WatchedTensors:
    """The tensors of a model that absorb the rotation, in the order in which :func:`absorb` takes them."""
    return WatchedTensors([tensor for qkv, _, o_proj in attention_layers(model) for tensor in rotated(qkv, o_proj)])


def rotated(qkv: Any, o_proj: Any) -> list[torch.Tensor]:
    """What of a layer absorbs the rotation: rows of values and their bias, where there is one, and the output."""
    begin = first_value_row(qkv)
    return [qkv.weight[begin:], *([] if qkv.bias is None else [qkv.bias[begin:]]), o_proj.weight]


def first_value_row(qkv: Any) -> int:
    """Where the values begin among the rows of a fused projection."""
    return int(qkv.q_proj_shard_size + qkv.kv_proj_shard_size)


def absorb(model: nn.Module, settings: Settings, written: list[bool] | None = None) -> None:
    """Absorb the value rotation if it is wanted and the weights allow it.

    Args:
        model: loaded model in checkpoint layout.
        settings: settings of int2 mode.
        written: which of the tensors of :func:`watched` are new; None for all.

    Raises:
        Int2Error: the rotation cannot be loaded.
    """
    if not settings.absorb_v_rotation or settings.v_rotation == IDENTITY:
        return
    layers = list(attention_layers(model))
    if (reason := obstacle(model, layers)) is not None:
        logger.warning("int2 rotates values online instead of absorbing the rotation: %s", reason)
        return
    new = iter(repeat(True) if written is None else written)
    for (qkv, _, o_proj), value in zip(layers, _value_transforms(settings, layers), strict=True):
        rows, bias = next(new), qkv.bias is not None and next(new)
        output = next(new)
        if value.matrix is None or value.reading is None:
            continue  # This layer's values are left exact.
        with torch.no_grad():
            matrix = value.matrix.to(qkv.weight.device)
            if rows:
                rotate_value_rows(qkv, matrix)
            if bias:
                rotate_value_bias(qkv, matrix)
            if output:
                rotate_output_columns(o_proj, value.reading.to(o_proj.weight.device))
    setattr(model, MARK, True)


def _value_transforms(settings: Settings, layers: list[tuple[Any, Any, Any]]) -> list[SideTransform]:
    """What happens to the values of this rank's heads, for each of the model's layers."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    config = releases.model_config(args)
    formats, heads = model_formats(args, settings, config), own_heads(config)
    return [formats[attn.layer_id].value.transform.of_heads(heads) for _, attn, _ in layers]


def attention_layers(model: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """(qkv_proj, RadixAttention, o_proj) of every attention block that has them under these names."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        attn = getattr(module, "attn", None)
        if isinstance(attn, RadixAttention) and hasattr(module, "qkv_proj") and hasattr(module, "o_proj"):
            yield module.qkv_proj, attn, module.o_proj


def obstacle(model: nn.Module, layers: list[tuple[Any, Any, Any]]) -> str | None:
    """Why the rotation cannot be absorbed into this model, or None."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.radix_attention import RadixAttention

    name = type(model).__name__
    if name not in ARCHITECTURES:
        return f"{name} is not known to lead attention output straight into o_proj"
    every = [module.layer_id for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers or sorted(attn.layer_id for _, attn, _ in layers) != sorted(every):
        return f"{name} has attention layers without qkv_proj and o_proj"
    for qkv, attn, o_proj in layers:
        for linear in (qkv, o_proj):
            plain = isinstance(linear.quant_method, UnquantizedLinearMethod)
            if not plain or linear.weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                return f"projections of layer {attn.layer_id} are quantized"
    return None


def rotate_value_rows(qkv: Any, matrix: torch.Tensor) -> None:
    """W_v <- R^T W_v in place, head by head, on this rank's shard of a fused QKV projection.

    Args:
        qkv: QKVParallelLinear; weight [q + k + v rows, hidden].
        matrix: [head_dim, head_dim], or [kv_heads, head_dim, head_dim] with one for every kv head of this rank.
    """
    rows = qkv.weight[first_value_row(qkv) :]
    heads = rows.float().view(-1, matrix.shape[-1], rows.shape[1])
    rows.copy_((matrix.mT @ heads).view_as(rows))


def rotate_value_bias(qkv: Any, matrix: torch.Tensor) -> None:
    """b_v <- b_v R in place; arguments as of :func:`rotate_value_rows`, with a bias."""
    bias = qkv.bias[first_value_row(qkv) :]
    bias.copy_(rotate(bias.view(-1, matrix.shape[-1]), matrix).view_as(bias))


def rotate_output_columns(o_proj: Any, reading: torch.Tensor) -> None:
    """W_o <- W_o R in place, head by head, on this rank's shard of the output projection.

    Args:
        o_proj: RowParallelLinear; weight [hidden, q_heads * head_dim].
        reading: [head_dim, head_dim], or [kv_heads, head_dim, head_dim] with one for the query heads of every kv head;
            of a transform that is not orthogonal, its dual.
    """
    weight = o_proj.weight
    heads = weight.view(weight.shape[0], -1, reading.shape[-1])
    weight.copy_(rotate(heads, reading).view_as(weight))
