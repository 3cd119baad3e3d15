"""Where the memory of a model would go, estimated without loading it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from oscar_tools.doctor.check import quiet
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.origin import cached_snapshot, weight_files

MEM_FRACTION = 0.85
"""Share of the memory that the estimate gives to weights and cache; SGLang's own default depends on the GPU."""
GIB = 1 << 30
IN_FLIGHT = 2 * 8192
"""Tokens of prompts that the estimate takes to be computed at once."""


def weight_bytes(model: str) -> int:
    """Size of a model's weights: a folder's, a file's, or what was downloaded from a hub; 0 where none are here.

    Of a folder that has the same weights in several formats, SGLang loads one.
    """
    place = Path(model) if Path(model).exists() else cached_snapshot(model)
    return 0 if place is None else sum(path.stat().st_size for path in weight_files(place))


Sizes = Callable[[], dict[str, int]]
""":func:`parameters` of the model that is asked about, computed when they are needed, and once."""


def configured_bytes(config: Any, sizes: Sizes) -> int:
    """Size of the weights of a model that is not here, in 16 bits, by its configuration of transformers; 0 where it is
    quantized, or where transformers cannot tell."""
    if getattr(config, "quantization_config", None) is not None:
        return 0
    return 2 * sum(sizes().values())


def parameters(config: Any) -> dict[str, int]:
    """How many numbers each weight of a model has, by its configuration; none where transformers cannot tell."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # whatever a configuration of another kind raises
        return {}
    return {name: tensor.numel() for name, tensor in model.named_parameters()}


def share_of_weights(loaded: dict[str, Any], sizes: Sizes) -> float:
    """What one rank has of the weights: its part of everything, but of attention that of its replica.

    Raises:
        Int2Error: how many weights are those of attention is not known.
    """
    ranks, all_ranks = loaded["ranks"], loaded["all ranks"]
    if ranks == all_ranks:
        return 1 / ranks
    if not (found := sizes()):
        raise Int2Error("replicas of attention cannot be sized for this model; leave out --dp")
    attention = sum(size for name, size in found.items() if "attn" in name) / sum(found.values())
    return attention / ranks + (1 - attention) / all_ranks


def estimated_geometry(loaded: dict[str, Any]) -> Any:
    """Costs on one rank of the model of :func:`oscar_tools.doctor.model.model_checks`; where there are no rotations,
    with the bits and codings that a calibration gives it."""
    from oscar_kernels.format import LayerFormat, SideFormat
    from oscar_kernels.layout import AFFINE, CODEBOOK
    from oscar_rotation.fit.bit_goal import BitGoal
    from sglang_oscar.formats.geometry import Geometry
    from sglang_oscar.rotation_source.cache import bits_of

    settings, layers = loaded["settings"], cached_layer_ids(loaded["model"])
    windows = settings.windows, settings.window_torch_dtype
    heads = loaded["model"].get_num_kv_heads(loaded["ranks"])
    if "formats" in loaded:
        # Of ranks that have other parts of layers the largest.
        firsts = range(0, loaded["layouts"][0].kv_heads, heads)
        of_ranks = [{n: of.of_heads(slice(i, i + heads)) for n, of in loaded["formats"].items()} for i in firsts]
        return max((Geometry(of_rank, *windows) for of_rank in of_ranks), key=lambda rank: rank.cell_bytes)
    layouts, goal = loaded["layouts"], BitGoal.parse(bits_of(settings))
    of_sides = (goal.key, settings.k_coding or AFFINE), (goal.value, settings.v_coding or AFFINE)
    key, value = (
        SideFormat(
            layout.group_size, layout.scale_dtype, bits or layout.bits, exact_dtype=layout.exact_dtype, coding=coding,
            codebook=empty_codebook(heads, layout.head_dim) if coding == CODEBOOK else None,
        )
        for layout, (bits, coding) in zip(layouts, of_sides, strict=True)
    )  # fmt: skip
    layer = LayerFormat(heads, layouts[0].head_dim, key, value, layouts[1].head_dim)
    return Geometry(dict.fromkeys(layers, layer), *windows)


def empty_codebook(heads: int, head_dim: int) -> Any:
    """A codebook that says how large rows are, of points that are all zero."""
    import torch

    from oscar_kernels.codebook import GROUP, POINTS, Codebook

    return Codebook.from_points(torch.zeros(heads, head_dim // GROUP, POINTS, GROUP))


def account_of(loaded: dict[str, Any], models: tuple[str, str], memory: int) -> str:
    """Where the memory of a device would go, and what of the weights is not counted.

    Args:
        loaded: what :func:`oscar_tools.doctor.model.model_checks` has found of the model.
        models: it, and its draft model or itself.
        memory: bytes of a device.

    Raises:
        Int2Error: there is too little.
    """
    here = {name: weight_bytes(name) for name in models}
    missing = [name for name, size in here.items() if not size]
    config = loaded["model"].hf_config
    sizes = cache(partial(parameters, config))
    guess = configured_bytes(config, sizes) if models[0] in missing else 0
    weights = (sum(here.values()) + guess) * share_of_weights(loaded, sizes)
    if (weights := int(weights)) >= (room := int(MEM_FRACTION * memory)):
        raise Int2Error(f"weights take {weights / GIB:.1f} GiB of {room / GIB:.1f} GiB on a device; raise --tp")
    account = memory_account(loaded, room - weights)
    counted = {models[0]: f"counted as {guess / 1e9:.1f} GB in 16 bits"} if guess else {}
    return account + "".join(f"; weights of {x} are not here and {counted.get(x, 'not counted')}" for x in missing)


def memory_account(loaded: dict[str, Any], budget: int) -> str:
    """Where the memory for states and cache would go; plan and tokens are kept for later.

    Args:
        loaded: what :func:`oscar_tools.doctor.model.model_checks` has found of the model.
        budget: bytes.

    Raises:
        Int2Error: there is too little.
    """
    from sglang_oscar.features.hybrids.state_slots import estimate
    from sglang_oscar.features.sliding_windows.window_pool import window_pool
    from sglang_oscar.features.speculation.draft_model import DraftCache
    from sglang_oscar.formats.cached_layers import linear_config
    from sglang_oscar.memory.plan import make_plan
    from sglang_oscar.names import DEFAULT_PAGE_SIZE

    geometry, linear = estimated_geometry(loaded), linear_config(loaded["model"])
    slots = None if linear is None else estimate(linear, geometry, budget, loaded["ranks"], _drafts(loaded))
    budget -= 0 if slots is None else slots.bytes + slots.verified_bytes
    model, settings = loaded["model"], loaded["settings"]
    draft = DraftCache(loaded["draft bytes"]) if "draft bytes" in loaded else None
    windows = window_pool(
        model,
        settings,
        model.sliding_window_size,
        loaded["ranks"],
        DEFAULT_PAGE_SIZE,
        IN_FLIGHT,
        2 * _drafts(loaded),
        None,
    )
    parts = [part for part in (draft, windows, slots, *_workspaces(loaded, geometry, budget)) if part is not None]
    loaded["plan"] = plan = make_plan(geometry, budget, None, DEFAULT_PAGE_SIZE, parts)
    loaded["tokens"] = (budget - plan.fixed_bytes) // plan.token_bytes
    return "; ".join(plan.lines(loaded["tokens"]))


def _drafts(loaded: dict[str, Any]) -> int:
    """Tokens of a request that are verified at once; 0 without a draft model."""
    from sglang_oscar.features.speculation.arguments import CHAIN

    return CHAIN["speculative_num_draft_tokens"] if "draft bytes" in loaded else 0


def _workspaces(loaded: dict[str, Any], geometry: Any, budget: int) -> tuple[Any, Any]:
    """What attention to prompts and decode take beside the cache, on one rank; two None without a GPU.

    Raises:
        Int2Error: a kernel is asked for that cannot be had.
    """
    import torch

    from sglang_oscar.attention import extend_choice
    from sglang_oscar.attention.decode_choice import DecodeTask
    from sglang_oscar.attention.decode_workspace import decode_workspace, without_rows
    from sglang_oscar.names import DEFAULT_PAGE_SIZE

    if not torch.cuda.is_available():
        return None, None
    model, settings = loaded["model"], loaded["settings"]
    q_heads, extend = model.num_attention_heads // loaded["ranks"], None
    backend = extend_choice.choose(
        settings.extend_backend, "cuda", (model.head_dim, model.v_head_dim), model.has_attention_sinks
    )
    if backend is not None and backend != "triton":
        extend = extend_choice.workspace(backend, geometry.any_layer, q_heads, model.dtype, budget)
    kinds, short_chunks = without_rows(geometry, "cuda"), extend is not None
    task = DecodeTask(
        settings.decode_backend, kinds, DEFAULT_PAGE_SIZE, q_heads, model.dtype, short_chunks, _drafts(loaded),
        kv_heads=geometry.any_layer.kv_heads,
    )  # fmt: skip
    return extend, decode_workspace(task, geometry.formats, model.context_len, loaded["ranks"])
