"""Where the memory of a model would go, estimated without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_oscar.memory.cached_layers import cached_layer_ids
from sglang_oscar.weights.origin import cached_snapshot, weight_files

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
    """Costs of the model of :func:`sglang_oscar.doctor.model.model_checks`, also where its rotations cannot be had."""
    from sglang_oscar.memory.geometry import Geometry

    settings, layers = loaded["settings"], cached_layer_ids(loaded["model"])
    windows = settings.windows, settings.window_torch_dtype
    if "formats" in loaded:
        return Geometry(loaded["formats"], *windows)
    return Geometry.uniform(loaded["layout"], *windows, len(layers))


def memory_account(loaded: dict[str, Any], budget: int) -> str:
    """Where the memory for states and cache would go; tokens are kept for later.

    Args:
        loaded: what :func:`sglang_oscar.doctor.model.model_checks` has found of the model.
        budget: bytes.

    Raises:
        Int2Error: there is too little.
    """
    from sglang_oscar.hybrids.layers import linear_config
    from sglang_oscar.hybrids.state_slots import estimate
    from sglang_oscar.memory.plan import make_plan
    from sglang_oscar.names import DEFAULT_PAGE_SIZE
    from sglang_oscar.sliding_windows.plan import window_pool

    geometry, linear = estimated_geometry(loaded), linear_config(loaded["model"])
    slots = None if linear is None else estimate(linear, geometry, budget)
    budget -= 0 if slots is None else slots.bytes
    draft, model, settings = loaded.get("draft bytes", 0), loaded["model"], loaded["settings"]
    windows = window_pool(model, settings, model.sliding_window_size, 1, DEFAULT_PAGE_SIZE, IN_FLIGHT, None)
    plan = make_plan(geometry, budget, None, DEFAULT_PAGE_SIZE, draft_bytes=draft, states=slots, windows=windows)
    loaded["tokens"] = (budget - plan.fixed_bytes) // plan.token_bytes
    return "; ".join(plan.lines(loaded["tokens"]))


def host_facts(loaded: dict[str, Any], size: int, ratio: float) -> str:
    """What host memory would hold of the model of :func:`sglang_oscar.doctor.model.model_checks`."""
    from sglang_oscar.names import DEFAULT_PAGE_SIZE
    from sglang_oscar.tiers.pages import PageLayout, host_line, host_tokens

    page = PageLayout.of_formats(estimated_geometry(loaded).formats, DEFAULT_PAGE_SIZE)
    return host_line(host_tokens(page, size, ratio, loaded["tokens"]), page)
