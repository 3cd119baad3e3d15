"""Where the memory of a model would go, estimated without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_oscar.formats.cached_layers import cached_layer_ids
from sglang_oscar.formats.origin import cached_snapshot, weight_files

MEM_FRACTION = 0.85
"""Share of the memory that the estimate gives to weights and cache; SGLang's own default depends on the GPU."""
IN_FLIGHT = 2 * 8192
"""Tokens of prompts that the estimate takes to be computed at once."""


def weight_bytes(model: str) -> int:
    """Size of a model's weights: a folder's, a file's, or what was downloaded from a hub; 0 where none are here.

    Of a folder that has the same weights in several formats, SGLang loads one.
    """
    place = Path(model) if Path(model).exists() else cached_snapshot(model)
    return 0 if place is None else sum(path.stat().st_size for path in weight_files(place))


def estimated_geometry(loaded: dict[str, Any]) -> Any:
    """Costs of the model of :func:`oscar_tools.doctor.model.model_checks`, also where its rotations cannot be had."""
    from sglang_oscar.formats.geometry import Geometry

    settings, layers = loaded["settings"], cached_layer_ids(loaded["model"])
    windows = settings.windows, settings.window_torch_dtype
    if "formats" in loaded:
        return Geometry(loaded["formats"], *windows)
    return Geometry.uniform(loaded["layout"], *windows, len(layers))


def memory_account(loaded: dict[str, Any], budget: int) -> str:
    """Where the memory for states and cache would go; tokens are kept for later.

    Args:
        loaded: what :func:`oscar_tools.doctor.model.model_checks` has found of the model.
        budget: bytes.

    Raises:
        Int2Error: there is too little.
    """
    from sglang_oscar.features.hybrids.layers import linear_config
    from sglang_oscar.features.hybrids.state_slots import estimate
    from sglang_oscar.features.sliding_windows.plan import window_pool
    from sglang_oscar.memory.plan import make_plan
    from sglang_oscar.names import DEFAULT_PAGE_SIZE

    geometry, linear = estimated_geometry(loaded), linear_config(loaded["model"])
    slots = None if linear is None else estimate(linear, geometry, budget)
    budget -= 0 if slots is None else slots.bytes
    draft, model, settings = loaded.get("draft bytes", 0), loaded["model"], loaded["settings"]
    windows = window_pool(model, settings, model.sliding_window_size, 1, DEFAULT_PAGE_SIZE, IN_FLIGHT, None)
    extend, beside = _workspaces(loaded, geometry, budget)
    plan = make_plan(
        geometry, budget, None, DEFAULT_PAGE_SIZE, extend, draft, states=slots, windows=windows, scratch=beside
    )
    loaded["tokens"] = (budget - plan.fixed_bytes) // plan.token_bytes
    return "; ".join(plan.lines(loaded["tokens"]))


def _workspaces(loaded: dict[str, Any], geometry: Any, budget: int) -> tuple[Any, Any]:
    """What attention to prompts and decode take beside the cache, on one rank; two None without a GPU.

    Raises:
        Int2Error: a kernel is asked for that cannot be had.
    """
    import torch

    from sglang_oscar.attention import extend_choice
    from sglang_oscar.attention.scratch import scratch
    from sglang_oscar.features.speculation.arguments import CHAIN
    from sglang_oscar.names import DEFAULT_PAGE_SIZE

    if not torch.cuda.is_available():
        return None, None
    model, settings = loaded["model"], loaded["settings"]
    q_heads, extend = model.num_attention_heads, None
    backend = extend_choice.choose(settings.extend_backend, "cuda", model.head_dim, model.has_attention_sinks)
    if backend is not None and backend != "triton":
        extend = extend_choice.workspace(backend, geometry.any_layer, q_heads, model.dtype, budget)
    drafts = CHAIN["speculative_num_draft_tokens"] if "draft bytes" in loaded else 0
    beside = scratch(
        geometry, settings.decode_backend, "cuda", model.dtype, q_heads, DEFAULT_PAGE_SIZE, model.context_len, drafts,
        1, extend is not None,
    )  # fmt: skip
    return extend, beside


def host_facts(loaded: dict[str, Any], size: int, ratio: float) -> str:
    """What host memory would hold of the model of :func:`oscar_tools.doctor.model.model_checks`."""
    from sglang_oscar.features.tiers.pages import PageLayout, host_line, host_tokens
    from sglang_oscar.names import DEFAULT_PAGE_SIZE

    page = PageLayout.of_formats(estimated_geometry(loaded).formats, DEFAULT_PAGE_SIZE)
    return host_line(host_tokens(page, size, ratio, loaded["tokens"]), page)
