"""A piece of history in decode: one kv head's rows of a run of tiles, attended to by one warp.

A warp unpacks a tile's codes without converting them (see :mod:`arith`), and scale and zero point never touch a code:
with c the codes, s and z scale and zero point of a token's group, ``q . k = s (q . c - z sum(q))`` and
``sum p v = sum (p s) c - sum p s z``. Points of a codebook are codes, too: whole numbers, whose factor is multiplied
into the queries. So that p s fits float16 whatever the scale of the values, the running maximum of
the online softmax is that of log2(p s), not of log2(p).

A side that is left exact is read as numbers of 16 bits, as windows are.
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
from oscar_kernels.triton.padding import padded

Q_PEAK = tl.constexpr(2.0**13)
"""Queries enter the tensor cores as float16 with largest magnitude in [Q_PEAK, 2 Q_PEAK)."""
Q_UNSCALE = tl.constexpr(1.4426950408889634 * 2.0**24 / 2.0**13)
"""log2(e) * CODES_PER_UNIT / Q_PEAK: what makes a product of such queries with codes a logit in log2."""
Q_UNSCALE_POINTS = tl.constexpr(1.4426950408889634 / 2.0**13)
"""The same with points, which are no subnormals."""


@triton.jit
def load_heads(q_rows, mask, D: tl.constexpr):
    """All channels of the queries: [BLOCK_H, padded(D), BLOCK_G], 0 where there are none."""
    channel = tl.arange(0, padded(D))
    live = mask[:, None, :]
    if padded(D) != D:
        live = live & (channel < D)[None, :, None]
    return tl.load(q_rows[:, None, :] + channel[None, :, None], mask=live, other=0.0)


@triton.jit
def _load_units(
    q_rows, mask, factor_rows, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CODING: tl.constexpr
):  # fmt: skip
    """The queries by units of the keys (:func:`unit_channels`): float32 [BLOCK_H, UNIT, BLOCK_G] each, with a codebook
    times its factors at pointers [BLOCK_H].
    """
    UNIT: tl.constexpr = unit_size(D, BITS, GROUP)
    units = ()
    for u in tl.static_range(D // UNIT):
        channel = unit_channels(u, D, BITS, GROUP, CODING)
        q = tl.load(q_rows[:, None, :] + channel[None, :, None], mask=mask[:, None, :], other=0.0).to(tl.float32)
        if CODING == CODEBOOK:
            q = q * tl.load(factor_rows[:, None] + (u // 4 * UNIT + tl.arange(0, UNIT))[None, :])[:, :, None]
        units = units + (q,)
    return units


@triton.jit
def attend_history(
    q_rows, q_mask, k_rows_ptr, v_rows_ptr, k_points_ptr, k_factor_ptr, pages_ptr, head,
    tile_begin, tile_end, begin, end, sm_scale, o_rows, lse_ptrs,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, K_CODING: tl.constexpr, V_CODING: tl.constexpr, K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr, SCALE_DTYPE: tl.constexpr, EXACT_DTYPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A piece of history: positions [begin, end) of tiles [tile_begin, tile_end); every tile has one at least."""
    K_UNIT: tl.constexpr = unit_size(D, K_BITS, K_GROUP)
    V_UNIT: tl.constexpr = unit_size(V_D, V_BITS, V_GROUP)
    K_UNITS: tl.constexpr = D // K_UNIT
    V_UNITS: tl.constexpr = V_D // V_UNIT
    K_GROUPS: tl.constexpr = D // K_GROUP
    V_GROUPS: tl.constexpr = V_D // V_GROUP
    K_CODE_BYTES: tl.constexpr = code_bytes(D, K_BITS)
    V_CODE_BYTES: tl.constexpr = code_bytes(V_D, V_BITS)

    if K_BITS == EXACT:
        channel = tl.arange(0, padded(D))
        q = load_heads(q_rows, q_mask, D)
        q = narrow(q.to(tl.float32), EXACT_DTYPE)
    else:
        # Queries: normalized by one power of two, without the weight that its bit position gives to a plane.
        wide = _load_units(q_rows, q_mask, k_factor_ptr + head * (D // 4), D, K_BITS, K_GROUP, K_CODING)
        largest = tl.full([], 1e-30, tl.float32)
        for u in tl.static_range(K_UNITS):
            # The queries share it: those of a draft that are no numbers keep it out of the others'.
            size = tl.abs(wide[u])
            size = tl.where(size < float("inf"), size, 0.0)
            largest = tl.maximum(largest, tl.max(tl.max(tl.max(size, 2), 1), 0))
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = Q_PEAK / power
        unscale = power * (sm_scale * (Q_UNSCALE_POINTS if K_CODING == CODEBOOK else Q_UNSCALE))
        q = ()
        for u in tl.static_range(K_UNITS):
            q = q + ((wide[u] * (factor * (1.0 / unit_weight(u, K_BITS, K_CODING)))).to(tl.float16),)
        q_sums = ()
        for g in tl.static_range(K_GROUPS):
            q_sum = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
            for u in tl.static_range(K_UNITS):
                if unit_group(u, D, K_BITS, K_GROUP) == g:
                    q_sum += tl.sum(wide[u], 1)
            q_sums = q_sums + ((q_sum * (sm_scale * LOG2_E))[:, None, :],)

    offset = tl.arange(0, BLOCK_N)
    k_byte = tl.arange(0, K_UNIT)
    v_byte = tl.arange(0, V_UNIT)
    top = tl.full([BLOCK_H, BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_G], tl.float32)
    shift = ()
    for g in tl.static_range(V_GROUPS):
        shift = shift + (tl.zeros([BLOCK_H, BLOCK_G], tl.float32),)
    out = ()
    for u in tl.static_range(V_UNITS):
        out = out + (tl.zeros([BLOCK_H, V_UNIT, BLOCK_G], tl.float32),)

    k_head_params = KV_HEADS * K_CODE_BYTES + head * param_bytes(K_GROUPS, SCALE_DTYPE, K_CODING)
    v_head_params = KV_HEADS * V_CODE_BYTES + head * param_bytes(V_GROUPS, SCALE_DTYPE, V_CODING)
    for tile in range(tile_begin, tile_end):
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

        # Every slot of a tile exists and any byte is four codes, so loads of codes, and of exact keys, need no mask;
        # what lies outside [begin, end) is cut off at the logits and at the scales and zero points of the values.
        if K_BITS == EXACT:
            at = exact_channels(k_row[None, :, None], head[:, None, None], D, EXACT_DTYPE) + channel[None, None, :]
            if padded(D) == D:
                k = tl.load(at)
            else:
                k = tl.load(at, mask=(channel < D)[None, None, :], other=0.0)
            logits = dot(k, q, tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)) * (sm_scale * LOG2_E)
        else:
            scales, zeros = load_params(
                k_row[None, :] + k_head_params[:, None], K_GROUPS, SCALE_DTYPE, K_BITS, K_CODING
            )
            at = k_row[None, :, None] + (head * K_CODE_BYTES)[:, None, None]
            codes = ()
            for span in tl.static_range(K_UNITS // plane_count(K_BITS)):
                if K_CODING == CODEBOOK:
                    points = k_points_ptr + (head * (D // 4 * 256))[:, None, None]
                    codes = codes + load_points(at, points, (span * K_UNIT + k_byte)[None, None, :])
                else:
                    codes = codes + load_codes(at, span, k_byte[None, None, :], D, K_BITS, K_UNIT)
            logits = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)
            for g in tl.static_range(K_GROUPS):
                product = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_G], tl.float32)
                for u in tl.static_range(K_UNITS):
                    if unit_group(u, D, K_BITS, K_GROUP) == g:
                        product = dot(codes[u], q[u], product)
                logits += product * (scales[g] * unscale)[:, :, None]
                if K_CODING != CODEBOOK:
                    logits -= (scales[g] * zeros[g])[:, :, None] * q_sums[g]
        logits = tl.where(live[None, :, None], logits, float("-inf"))

        # Online softmax over log2(p * largest value scale); numbers of 16 bits have no scale.
        if V_BITS != EXACT:
            scales, zeros = load_params(
                v_row[None, :] + v_head_params[:, None], V_GROUPS, SCALE_DTYPE, V_BITS, V_CODING
            )
            largest_scale = scales[0]
            for g in tl.static_range(1, V_GROUPS):
                largest_scale = tl.maximum(largest_scale, scales[g])
            largest_scale = tl.where(live[None, :], tl.maximum(largest_scale, 1e-30), 1.0)
            logits += log2(largest_scale)[:, :, None]
        new_top = tl.maximum(top, tl.max(logits, 1))
        fade = exp2(top - new_top)
        top = new_top
        p = exp2(logits - top[:, None, :])
        new_out = ()
        if V_BITS == EXACT:
            total = total * fade + tl.sum(p, 1)
            weight = narrow(p, EXACT_DTYPE)
            at = exact_channels(v_row[None, None, :], head[:, None, None], V_D, EXACT_DTYPE)
            for u in tl.static_range(V_UNITS):
                channel_of_unit = unit_start(u, V_D, V_BITS, V_GROUP) + v_byte
                # A row that is not live may hold a NaN, which a weight of 0 would not hide.
                v = tl.load(at + channel_of_unit[None, :, None], mask=live[None, None, :], other=0.0)
                new_out = new_out + (dot(v, weight, out[u] * fade[:, None, :]),)
        else:
            inverse = reciprocal(largest_scale)
            total = total * fade + tl.sum(p * inverse[:, :, None], 1)

            at = v_row[None, None, :] + (head * V_CODE_BYTES)[:, None, None]
            codes = ()
            for span in tl.static_range(V_UNITS // plane_count(V_BITS)):
                codes = codes + load_codes(at, span, v_byte[None, :, None], V_D, V_BITS, V_UNIT)
            weights = ()
            new_shift = ()
            for g in tl.static_range(V_GROUPS):
                weight = p
                if V_GROUPS > 1:
                    weight = p * tl.where(live[None, :], scales[g] * inverse, 0.0)[:, :, None]
                weights = weights + (weight.to(tl.float16),)
                # In float32: a group of equal values has a tiny scale and a zero point as large as that is small.
                zero = tl.where(live[None, :], zeros[g], 0.0)
                new_shift = new_shift + (shift[g] * fade + tl.sum(weight * zero[:, :, None], 1),)
            shift = new_shift
            for u in tl.static_range(V_UNITS):
                weight = weights[unit_group(u, V_D, V_BITS, V_GROUP)]
                new_out = new_out + (dot(codes[u], weight, out[u] * fade[:, None, :]),)
        out = new_out

    inverse = 1.0 / total
    for u in tl.static_range(V_UNITS):
        if V_BITS == EXACT:
            value = out[u] * inverse[:, None, :]
        else:
            moved = shift[unit_group(u, V_D, V_BITS, V_GROUP)]
            value = (out[u] * (CODES_PER_UNIT / unit_weight(u, V_BITS)) - moved[:, None, :]) * inverse[:, None, :]
        channel = unit_start(u, V_D, V_BITS, V_GROUP) + v_byte
        tl.store(o_rows[:, None, :] + channel[None, :, None], value, mask=q_mask[:, None, :])
    tl.store(lse_ptrs, top + tl.log2(total), mask=q_mask)
