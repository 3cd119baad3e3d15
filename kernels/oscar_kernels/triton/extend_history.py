"""A tile of query rows over the history of its request, whose rows are codes or 16 bits.

The arithmetic is that of :mod:`oscar_kernels.triton.decode_history`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oscar_kernels.triton.arith import (
    CODEBOOK,
    CODES_PER_UNIT,
    EXACT,
    LOG2_E,
    code_bytes,
    dot,
    exact_channels,
    exp2,
    load_codes,
    load_params,
    load_points,
    log2,
    narrow,
    param_bytes,
    plane_count,
    reciprocal,
    unit_channels,
    unit_group,
    unit_size,
    unit_start,
    unit_weight,
)
from oscar_kernels.triton.decode_history import Q_PEAK, Q_UNSCALE, Q_UNSCALE_POINTS
from oscar_kernels.triton.padding import channel_mask, padded


@triton.jit
def load_rows(rows, mask, start, SIZE: tl.constexpr):
    """[rows, SIZE] from channel ``start`` on; 0 where masked."""
    return tl.load(rows[:, None] + (start + tl.arange(0, SIZE))[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def load_heads(rows, mask, D: tl.constexpr):
    """All channels of the rows: [rows, padded(D)], 0 where there are none."""
    at = rows[:, None] + tl.arange(0, padded(D))[None, :]
    return tl.load(at, mask=channel_mask(mask, D), other=0.0)


@triton.jit
def _load_unit(
    q_rows, mask, factor_row, u: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    CODING: tl.constexpr,
):  # fmt: skip
    """The queries' channels of a unit of the keys, float32 [rows, UNIT], with a codebook times its factors."""
    channel = unit_channels(u, D, BITS, GROUP, CODING)
    q = tl.load(q_rows[:, None] + channel[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    if CODING == CODEBOOK:
        UNIT: tl.constexpr = unit_size(D, BITS, GROUP)
        q = q * tl.load(factor_row + u // 4 * UNIT + tl.arange(0, UNIT))[None, :]
    return q


@triton.jit
def attend_history(
    state, q_rows, q_mask, k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr, pages_ptr, head, begin, end, sm_scale,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_CODING: tl.constexpr, V_CODING: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold history positions [begin, end) into ``state``, which must be fresh; see decode for the arithmetic."""
    K_UNIT: tl.constexpr = unit_size(D, K_BITS, K_GROUP)
    V_UNIT: tl.constexpr = unit_size(V_D, V_BITS, V_GROUP)
    K_UNITS: tl.constexpr = D // K_UNIT
    V_UNITS: tl.constexpr = V_D // V_UNIT
    K_GROUPS: tl.constexpr = D // K_GROUP
    V_GROUPS: tl.constexpr = V_D // V_GROUP
    K_CODE_BYTES: tl.constexpr = code_bytes(D, K_BITS)
    V_CODE_BYTES: tl.constexpr = code_bytes(V_D, V_BITS)
    top, total, out = state

    shift = ()
    for g in tl.static_range(V_GROUPS):
        shift = shift + (tl.zeros([BLOCK_M], tl.float32),)
    if K_BITS == EXACT:
        channel = tl.arange(0, padded(D))
        q = narrow(load_heads(q_rows, q_mask, D).to(tl.float32), EXACT_DTYPE)
    else:
        factor_row = k_factor_ptr + head * (D // 4)
        largest = tl.full([], 1e-30, tl.float32)
        for u in tl.static_range(K_UNITS):
            wide = _load_unit(q_rows, q_mask, factor_row, u, D, K_BITS, K_GROUP, K_CODING)
            # Tokens share it: one whose query is no number keeps it out of the others'.
            size = tl.abs(wide)
            size = tl.where(size < float("inf"), size, 0.0)
            largest = tl.maximum(largest, tl.max(tl.max(size, 1), 0))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = Q_PEAK / power
        unscale = power * (sm_scale * (Q_UNSCALE_POINTS if K_CODING == CODEBOOK else Q_UNSCALE))
        q = ()
        q_sums = ()
        for g in tl.static_range(K_GROUPS):
            q_sum = tl.zeros([BLOCK_M], tl.float32)
            for u in tl.static_range(K_UNITS):
                if unit_group(u, D, K_BITS, K_GROUP) == g:
                    wide = _load_unit(q_rows, q_mask, factor_row, u, D, K_BITS, K_GROUP, K_CODING)
                    q_sum += tl.sum(wide, 1)
            q_sums = q_sums + (q_sum * (sm_scale * LOG2_E),)
        for u in tl.static_range(K_UNITS):
            wide = _load_unit(q_rows, q_mask, factor_row, u, D, K_BITS, K_GROUP, K_CODING)
            q = q + ((wide * (factor * (1.0 / unit_weight(u, K_BITS, K_CODING)))).to(tl.float16),)

    offset = tl.arange(0, BLOCK_N)
    k_byte = tl.arange(0, K_UNIT)
    v_byte = tl.arange(0, V_UNIT)
    k_head_params = KV_HEADS * K_CODE_BYTES + head * param_bytes(K_GROUPS, SCALE_DTYPE, K_CODING)
    v_head_params = KV_HEADS * V_CODE_BYTES + head * param_bytes(V_GROUPS, SCALE_DTYPE, V_CODING)
    for tile in range(begin // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N):
        position = tile * BLOCK_N + offset
        live = (position >= begin) & (position < end)
        if PAGE >= BLOCK_N:
            page = tl.load(pages_ptr + (tile * BLOCK_N) // PAGE).to(tl.int64)
            slot = page * PAGE + (tile * BLOCK_N) % PAGE + offset
        else:
            page = tl.load(pages_ptr + position // PAGE, mask=live, other=0).to(tl.int64)
            # Not position % PAGE: from that Triton concludes that every slot is a multiple of PAGE.
            slot = page * PAGE + (position & (PAGE - 1))
        k_row = k_rows_ptr + slot * K_STRIDE
        v_row = v_rows_ptr + slot * V_STRIDE

        if K_BITS == EXACT:
            at = exact_channels(k_row, head, D, EXACT_DTYPE)[None, :] + channel[:, None]
            if padded(D) == D:
                k = tl.load(at)
            else:
                k = tl.load(at, mask=(channel < D)[:, None], other=0.0)
            logits = dot(q, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * (sm_scale * LOG2_E)
        else:
            scales, zeros = load_params(k_row + k_head_params, K_GROUPS, SCALE_DTYPE, K_BITS, K_CODING)
            codes = ()
            at = k_row[None, :] + head * K_CODE_BYTES
            for span in tl.static_range(K_UNITS // plane_count(K_BITS)):
                if K_CODING == CODEBOOK:
                    points = k_points_ptr + head * (D // 4 * 256)
                    codes = codes + load_points(at, points, (span * K_UNIT + k_byte)[:, None])
                else:
                    codes = codes + load_codes(at, span, k_byte[:, None], D, K_BITS, K_UNIT)
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for g in tl.static_range(K_GROUPS):
                product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for u in tl.static_range(K_UNITS):
                    if unit_group(u, D, K_BITS, K_GROUP) == g:
                        product = dot(q[u], codes[u], product)
                logits += product * (scales[g] * unscale)[None, :]
                if K_CODING != CODEBOOK:
                    logits -= q_sums[g][:, None] * (scales[g] * zeros[g])[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))

        if V_BITS != EXACT:
            scales, zeros = load_params(v_row + v_head_params, V_GROUPS, SCALE_DTYPE, V_BITS, V_CODING)
            largest_scale = scales[0]
            for g in tl.static_range(1, V_GROUPS):
                largest_scale = tl.maximum(largest_scale, scales[g])
            largest_scale = tl.where(live, tl.maximum(largest_scale, 1e-30), 1.0)
            logits += log2(largest_scale)[None, :]
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = exp2(top - new_top)
        top = new_top
        p = exp2(logits - top[:, None])
        new_out = ()
        if V_BITS == EXACT:
            total = total * fade + tl.sum(p, 1)
            weight = narrow(p, EXACT_DTYPE)
            numbers = exact_channels(v_row, head, V_D, EXACT_DTYPE)
            for u in tl.static_range(V_UNITS):
                v = load_rows(numbers, live, unit_start(u, V_D, V_BITS, V_GROUP), V_UNIT)
                new_out = new_out + (dot(weight, v, out[u] * fade[:, None]),)
        else:
            inverse = reciprocal(largest_scale)
            total = total * fade + tl.sum(p * inverse[None, :], 1)

            codes = ()
            for span in tl.static_range(V_UNITS // plane_count(V_BITS)):
                at = v_row[:, None] + head * V_CODE_BYTES
                codes = codes + load_codes(at, span, v_byte[None, :], V_D, V_BITS, V_UNIT)
            weights = ()
            new_shift = ()
            for g in tl.static_range(V_GROUPS):
                weight = p
                if V_GROUPS > 1:
                    weight = p * tl.where(live, scales[g] * inverse, 0.0)[None, :]
                weights = weights + (weight.to(tl.float16),)
                # In float32: a group of equal values has a tiny scale and a zero point as large as that is small.
                zero = tl.where(live, zeros[g], 0.0)
                new_shift = new_shift + (shift[g] * fade + tl.sum(weight * zero[None, :], 1),)
            shift = new_shift
            for u in tl.static_range(V_UNITS):
                weight = weights[unit_group(u, V_D, V_BITS, V_GROUP)]
                new_out = new_out + (dot(weight, codes[u], out[u] * fade[:, None]),)
        out = new_out

    if V_BITS != EXACT:
        values = ()
        for u in tl.static_range(V_UNITS):
            moved = shift[unit_group(u, V_D, V_BITS, V_GROUP)]
            values = values + (out[u] * (CODES_PER_UNIT / unit_weight(u, V_BITS)) - moved[:, None],)
        out = values
    return top, total, out
