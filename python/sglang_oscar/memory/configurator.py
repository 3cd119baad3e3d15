"""What SGLang's KVCacheConfigurator stands for in int2 mode: sizes of its rank, and the memory plan of its model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from oscar_kernels.format import any_cut
from sglang_oscar.attach import releases
from sglang_oscar.attach.arguments import new_tokens
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.geometry import Geometry, own_heads, with_room
from sglang_oscar.formats.rotations import model_formats
from sglang_oscar.memory.plan import MemoryPlan
from sglang_oscar.worker import of_this_process

_plans: WeakKeyDictionary[Any, MemoryPlan] = WeakKeyDictionary()
"""By model: a process may have two, each with a pool of its own, and SGLang's configurator takes no attributes."""


def geometry_of(configurator: Any) -> Geometry:
    """Sizes of this rank from SGLang's KVCacheConfigurator.

    Raises:
        Int2Error: the rotations cannot be loaded, or are not of all layers.
    """
    settings, info, model = of_this_process(), configurator.layer_info, configurator.model_config
    formats = model_formats(configurator.server_args, settings, model)
    if info.end_layer > model.num_hidden_layers:
        raise Int2Error(
            f"--kv-cache-dtype int2 needs one attention layer per cache layer; SGLang has "
            f"{info.end_layer - info.start_layer} for the {model.num_hidden_layers} of the model; use --kv-cache-dtype "
            "auto"
        )
    ids = [layer_id for layer_id in formats if info.start_layer <= layer_id < info.end_layer]
    heads = own_heads(configurator.model_config)
    own = {layer_id: formats[layer_id].of_heads(heads) for layer_id in ids}
    windows = with_room(settings.windows, new_tokens(releases.resolved(configurator.server_args)))
    return Geometry(own, windows, settings.window_torch_dtype)


def has_cut_layers(configurator: Any) -> bool:
    """Whether the model's layers, on any rank, are cut between kv heads: rows of ranks have other sizes then."""
    formats = model_formats(configurator.server_args, of_this_process(), configurator.model_config)
    return any_cut(formats.values())


def keep_plan(configurator: Any, plan: MemoryPlan) -> None:
    """Remember the plan of a configurator's model."""
    _plans[configurator.model] = plan


def plan_of(configurator: Any) -> MemoryPlan:
    """The memory plan of the model that a configurator is for.

    Raises:
        KeyError: none is made.
    """
    return _plans[configurator.model]
