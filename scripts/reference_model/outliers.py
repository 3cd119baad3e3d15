"""Key and value outliers by an exact change of coordinates.

Large models have a few key channels that are much larger than the rest and that queries hardly read; small models
trained for minutes do not, and a cache format cannot be told good from bad without them. Attention only sees
q . k, so multiplying a key channel by f and dividing the same query channel by f changes nothing. With QK-norm both
factors fit into the norm weights, and they commute with RoPE if both channels of a rotary pair get the same factor.
With f a power of two every product is the same floating-point number: BF16 logits are identical bit by bit, while
the keys in the cache now have outliers.
"""

from __future__ import annotations

import math

import torch


def scale_pair(
    state: dict[str, torch.Tensor], layer: int, pair: int, factor: float, head_dim: int = 128
) -> dict[str, torch.Tensor]:
    """Multiply keys by ``factor`` and divide queries by it in one rotary pair of one layer.

    Args:
        state: state dict with Qwen3's parameter names; not changed.
        layer: layer index.
        pair: j in 0..head_dim/2-1; channels j and j + head_dim/2 (NeoX-style rotary).
        factor: a power of two; 1/factor undoes it.

    Returns:
        a new state dict that shares all other tensors.

    Raises:
        ValueError: if the factor is not a power of two or the pair does not exist.
    """
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        raise ValueError(f"factor must be a power of two, got {factor}")
    if not 0 <= pair < head_dim // 2:
        raise ValueError(f"pair must be in 0..{head_dim // 2 - 1}, got {pair}")
    out = dict(state)
    for name, f in (("k_norm", factor), ("q_norm", 1 / factor)):
        key = f"model.layers.{layer}.self_attn.{name}.weight"
        weight = state[key].clone()
        weight[[pair, pair + head_dim // 2]] *= f
        out[key] = weight
    return out


def scale_value_channel(
    state: dict[str, torch.Tensor], layer: int, kv_head: int, channel: int, factor: float, head_dim: int = 128
) -> dict[str, torch.Tensor]:
    """Multiply one value channel of one kv head by ``factor`` and divide the columns of o_proj that read it.

    Attention mixes values token by token and never across channels, so the layer's output is what it was, bit by bit
    for a power of two.

    Args:
        state: state dict with Qwen3's parameter names; not changed.
        layer, kv_head, channel: which.
        factor: a power of two; 1/factor undoes it.

    Raises:
        ValueError: if the factor is not a power of two or the channel does not exist.
    """
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        raise ValueError(f"factor must be a power of two, got {factor}")
    v_key, o_key = (f"model.layers.{layer}.self_attn.{name}.weight" for name in ("v_proj", "o_proj"))
    v_weight, o_weight = state[v_key].clone(), state[o_key].clone()
    kv_heads = v_weight.shape[0] // head_dim
    if not (0 <= kv_head < kv_heads and 0 <= channel < head_dim):
        raise ValueError(f"kv head must be in 0..{kv_heads - 1} and channel in 0..{head_dim - 1}")
    v_weight.view(kv_heads, head_dim, -1)[kv_head, channel] *= factor
    o_weight.view(o_weight.shape[0], kv_heads, -1, head_dim)[:, kv_head, :, channel] *= 1 / factor
    return {**state, v_key: v_weight, o_key: o_weight}


MAX_GROWTH = 1.02
"""How much key energy a scaled pair may add outside the two directions of least query energy."""


def choose_pair(q_cov: torch.Tensor, k_cov: torch.Tensor, factor: float) -> int:
    """The pair to scale: most key energy in directions that queries then read least, and nowhere else.

    After scaling, the keys of the pair should lie in the two eigenvectors of least query energy, as the outliers of
    large models do; correlations with other query channels tilt those eigenvectors, and what leaks out of them may
    add at most ``MAX_GROWTH`` to the energy of all other directions. If every pair leaks more, the one that leaks
    least is taken.

    Args:
        q_cov, k_cov: second moments of post-RoPE queries and keys of a layer, [d, d].
        factor: what the keys will be multiplied by.

    Returns:
        pair index j.
    """
    d = q_cov.shape[0]
    q_cov, k_cov = q_cov.double().cpu(), k_cov.double().cpu()
    candidates = []
    # Pair 0 falls on Walsh rows 0 and d/2, which a plain Hadamard transform keeps constant inside a half: the zero
    # point of a group would absorb the outlier there without any calibration.
    for pair in range(1, d // 2):
        channels = [pair, pair + d // 2]
        scale = torch.ones(d, dtype=q_cov.dtype)
        scale[channels] = factor
        scaled = k_cov * scale[:, None] * scale
        lowest = torch.linalg.eigh(q_cov / scale[:, None] / scale).eigenvectors[:, :2]
        inside = float((lowest.T @ scaled @ lowest).trace())
        others = float(k_cov.trace() - k_cov.diagonal()[channels].sum())
        growth = (float(scaled.trace()) - inside) / others
        candidates.append((growth <= MAX_GROWTH, inside if growth <= MAX_GROWTH else -growth, pair))
    return max(candidates)[2]
