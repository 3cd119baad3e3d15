// Attention of one warp to 32 tokens of quantized history.
//
// Keys: S' = K Q', integer products. The keys' codes are bytes as they lie in the row, masked but not moved: a code that
// begins at bit 0 of a byte is worth itself, one at bit 2 four times that, which the query divides out; those from bit 4 on
// are worth 16 times as much and have sums of their own. Queries are 16-bit fixed-point numbers in two columns, high byte and
// low byte, so their rounding is finer than that of bfloat16.
// Values: O' = V' P', see values_fixed.cuh and values_float.cuh.
// Scales and zero points never touch a code: q.k = s (q.c - z sum(q)) and sum(p v) = sum((p s) c) - sum(p s z).
#pragma once

#include "tile.cuh"
#include "values_fixed.cuh"
#include "values_float.cuh"

// The queries of a kv head as columns of products: column 2 h is the high byte of head h, column 2 h + 1 the low byte.
struct QueryCodes {
  u32 digits[QK_BLOCKS][UNITS][2];
  float unit[QK_BLOCKS];          // what one sixteenth of a fixed-point unit adds to a log2 weight, for this lane's heads
  float sums[QK_BLOCKS][K_GROUPS];  // sum of a group's channels in sixteenths of units, for this lane's heads

  DEVICE void load(u32 q, float sm_scale);  // from shared memory: heads side by side
};

// Channel i of the eight that lane l % 4 = c supplies to product u.
DEVICE int query_channel(int unit, int c, int i) {
  if (KeyRows::NARROW) return KeyRows::channel(2 * unit + i / 4, 4 * c + i % 4);
  return KeyRows::channel(unit % KeyRows::PLANES, unit / KeyRows::PLANES * 32 + 8 * c + i);
}
// Products run over planes first; the group of product u.
DEVICE constexpr int group_of_unit(int unit) {
  if (KeyRows::NARROW) return KeyRows::group(2 * unit, 0);
  return KeyRows::group(unit % KeyRows::PLANES, unit / KeyRows::PLANES * 32);
}
// What the codes of channel i of product u are worth: 1 or 4, and 16 times that where the sums are those of upper nibbles.
DEVICE constexpr int code_weight(int unit, int i) {
  return KeyRows::weight(KeyRows::NARROW ? 2 * unit + i / 4 : unit % KeyRows::PLANES);
}
DEVICE constexpr int nibble_of_unit(int unit) { return code_weight(unit, 0) >= 16; }
DEVICE constexpr bool is_high_code(int unit, int i) { return code_weight(unit, i) % 16 == 4 || code_weight(unit, i) == 64; }

DEVICE void QueryCodes::load(u32 q, float sm_scale) {
  int lane = threadIdx.x % 32, column = lane / 4, c = lane % 4;
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    int head = 4 * b + column / 2;
    u32 row = q + (head < COLUMNS ? head : 0) * HEAD_DIM * 2;
    float x[UNITS][8];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int half = 0; half < 2; half++) {  // four channels side by side
        uint2 four = head < COLUMNS ? load_shared2(row + 2 * query_channel(u, c, 4 * half)) : make_uint2(0, 0);
        x[u][4 * half] = low_half<Q_BF16>(four.x);
        x[u][4 * half + 1] = high_half<Q_BF16>(four.x);
        x[u][4 * half + 2] = low_half<Q_BF16>(four.y);
        x[u][4 * half + 3] = high_half<Q_BF16>(four.y);
      }
    float peak = 1e-30f, part[K_GROUPS];
    for (float& p : part) p = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        peak = fmaxf(peak, fabsf(x[u][i]));
        part[group_of_unit(u)] += x[u][i];
      }
    for (int step = 1; step < 4; step *= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, step));
      for (float& p : part) p += __shfl_xor_sync(FULL_WARP, p, step);
    }
    // Above 3 * 2^22 the bits of a float count in ones, so a sum rounds and its low bits are the fixed-point number. The
    // low byte of it has a sign; 128 more carry that into the high byte.
    float factor = 32512.0f / peak;  // so that the high byte is at most 127
    float integer = column % 2 ? 12582912.0f : 12582912.0f + 128.0f;
    u32 pick = column % 2 ? 0x0040 : 0x0051;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 fixed[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          fixed[i] = __float_as_uint(
              fmaf(x[u][4 * half + i], is_high_code(u, 4 * half + i) ? factor * 0.25f : factor, integer));
        u32 first = __byte_perm(fixed[0], fixed[1], pick), second = __byte_perm(fixed[2], fixed[3], pick);
        digits[b][u][half] = __byte_perm(first, second, 0x5410);
      }
    // This lane's head is that of columns 2 (l % 4) and 2 (l % 4) + 1, which lane 8 (l % 4) has just prepared.
    unit[b] = sm_scale * LOG2_E / 16 / __shfl_sync(FULL_WARP, factor, 8 * c);
    for (int g = 0; g < K_GROUPS; g++) sums[b][g] = __shfl_sync(FULL_WARP, part[g] * factor * 16, 8 * c);
  }
}

// Products of the 16 tokens at ``tile`` with all queries: per group, and per nibble of the keys' bytes.
using KeyProducts = int[K_GROUPS][2][QK_BLOCKS][4];

DEVICE void key_products(KeyProducts& out, const QueryCodes& q, const Lane& lane, u32 tile) {
#pragma unroll
  for (int g = 0; g < K_GROUPS; g++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[g][n][b][i] = 0;
  auto multiply = [&](int unit, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++)
      mma_codes(out[group_of_unit(unit)][nibble_of_unit(unit)][b], a0, a1, a2, a3, q.digits[b][unit][0],
                q.digits[b][unit][1]);
  };
  constexpr int NEXT = 8 * KeyRows::ROW_BYTES;  // to the row eight tokens on
  constexpr bool HAS_HIGH = KeyRows::BITS == 3;
  auto codes = [](u32 low, u32 high, int plane) { return plane_codes<KeyRows>(low, high, plane); };
  if (KeyRows::NARROW) {
    u32 w = load_shared(tile), x = load_shared(tile + NEXT), w_high = 0, x_high = 0;
    if (HAS_HIGH) {
      w_high = load_shared(tile + lane.key_high) >> lane.key_shift;
      x_high = load_shared(tile + lane.key_high + NEXT) >> lane.key_shift;
    }
#pragma unroll
    for (int u = 0; u < 2; u++)
      multiply(u, codes(w, w_high, 2 * u), codes(x, x_high, 2 * u), codes(w, w_high, 2 * u + 1),
               codes(x, x_high, 2 * u + 1));
  } else {
#pragma unroll
    for (int span = 0; span < KeyRows::SPANS; span++) {
      u32 at = tile + 32 * span;
      uint2 w, x;
      if (KeyRows::ROW_BYTES % 8 == 0) {
        w = load_shared2(at), x = load_shared2(at + NEXT);
      } else {
        w = make_uint2(load_shared(at), load_shared(at + 4));
        x = make_uint2(load_shared(at + NEXT), load_shared(at + NEXT + 4));
      }
      u32 w_high = 0, x_high = 0;  // of the first four bytes at even bits, of the others at odd ones
      if (HAS_HIGH) {
        w_high = load_shared(tile + 16 * span + lane.key_high);
        x_high = load_shared(tile + 16 * span + lane.key_high + NEXT);
      }
#pragma unroll
      for (int plane = 0; plane < KeyRows::PLANES; plane++)
        multiply(KeyRows::PLANES * span + plane, codes(w.x, w_high, plane), codes(x.x, x_high, plane),
                 codes(w.y, w_high >> 1, plane), codes(x.y, x_high >> 1, plane));
    }
  }
}

// The product of token row 8 j + l / 4 with this lane's head of a block, in sixteenths of units.
DEVICE float key_product(const KeyProducts& products, int group, int block, int j) {
  auto whole = [&](int nibble) { return products[group][nibble][block][2 * j] * 256 + products[group][nibble][block][2 * j + 1]; };
  return __int2float_rn(whole(0) * 16 + whole(1));
}

// Values of up to four query heads are summed in integers, of more in floats.
template <bool FIXED>
struct ValuesOf {
  using type = FixedValues;
};
template <>
struct ValuesOf<false> {
  using type = FloatValues;
};
using Values = ValuesOf<PAIRED>::type;

// The tile's tokens [live_begin, live_end) count; the rest of the tile may hold anything.
DEVICE void attend_history(Softmax& softmax, Values& sums, const QueryCodes& q, const Lane& lane, u32 keys, u32 values,
                           int live_begin, int live_end) {
  Param value_params[TOKENS][V_GROUPS];
  float logits[TOKENS][QK_BLOCKS];  // in sixteenths of the query's units
#pragma unroll
  for (int i = 0; i < TOKENS; i += 2) {
    KeyProducts products;
    key_products(products, q, lane, keys + lane.key + 8 * i * KeyRows::ROW_BYTES);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      Param key_params[K_GROUPS];
      load_params(key_params, keys + lane.key_params + 8 * (i + j) * KeyRows::ROW_BYTES);
      load_params(value_params[i + j], values + lane.value_params + 8 * (i + j) * ValueRows::ROW_BYTES);
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++) {
        logits[i + j][b] = 0;
#pragma unroll
        for (int g = 0; g < K_GROUPS; g++)
          logits[i + j][b] +=
              key_params[g].scale * (key_product(products, g, b, j) - key_params[g].zero * q.sums[b][g]);
      }
    }
  }
  if (live_begin > 0 || live_end < TILE) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      int token = token_of_row(threadIdx.x % 32 / 4) + 8 * i;
      if (token < live_begin || token >= live_end) {
        for (int b = 0; b < QK_BLOCKS; b++) logits[i][b] = minus_infinity();
        for (int g = 0; g < V_GROUPS; g++) value_params[i][g] = {0, 0};
      }
    }
  }

  float weights[TOKENS][QK_BLOCKS];
  Values::Columns columns;
  for (bool raised = false;; raised = true) {
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++) weights[i][b] = exp2_fast(logits[i][b] * q.unit[b] - softmax.top[b]);
    bool fits = sums.round(columns, weights, value_params);
    // Weights times value scales far above their maximum so far are rare after the first tiles.
    if (raised || !__any_sync(FULL_WARP, !fits)) break;
    float peak[QK_BLOCKS], largest = 0;
    for (int b = 0; b < QK_BLOCKS; b++) {
      peak[b] = LOWEST;
      for (int i = 0; i < TOKENS; i++) peak[b] = fmaxf(peak[b], logits[i][b] * q.unit[b]);
    }
    Softmax::Fade fade = softmax.raise(peak);
    for (int i = 0; i < TOKENS; i++)
      for (int b = 0; b < QK_BLOCKS; b++) {
        float weight = exp2_fast(logits[i][b] * q.unit[b] - softmax.top[b]);
        for (int g = 0; g < V_GROUPS; g++) largest = fmaxf(largest, weight * value_params[i][g].scale);
      }
    for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    sums.scale(fade, largest);
  }

#pragma unroll
  for (int i = 0; i < TOKENS; i++)
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      softmax.total[b] += weights[i][b];
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++)
        softmax.shift[b][g] += weights[i][b] * value_params[i][g].scale * value_params[i][g].zero;
    }
  sums.add(columns, lane, values + lane.value_even, values + lane.value_odd);
}
