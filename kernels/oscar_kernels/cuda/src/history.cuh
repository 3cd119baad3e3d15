// Attention of one warp to 32 tokens of quantized history.
//
// Keys: S' = K Q', integer products. The keys' codes are bytes as they lie in the row, masked but not moved: a code at
// bits 0-1 of a byte is worth itself, one at bits 2-3 four times that, which the query divides out; those at bits 4-7 are
// worth 16 times as much and have sums of their own. Queries are 16-bit fixed-point numbers in two columns, high byte and
// low byte, so their rounding is finer than that of bfloat16.
// Values: O' = V' P', float16 products. The code at bits 2j of a 16-bit half is the subnormal number code 4^j 2^-24; the
// tensor cores multiply subnormals exactly, and the end of the segment divides 4^j 2^-24 out.
// Scales and zero points never touch a code: q.k = s (q.c - z sum(q)) and sum(p v) = sum((p s) c) - sum(p s z).
#pragma once

#include "softmax.cuh"

// Which token of a set of eight a row of a product is: chosen so that the rows that are loaded at the same time, in pairs
// of lanes for keys and for values, lie in different banks where a row is 8 words longer than a multiple of 32.
DEVICE int token_of_row(int row) { return row % 2 == 0 ? row / 2 : (row / 2 ^ 2) + 4; }

// The queries of a kv head as columns of products: column 2 h is the high byte of head h, column 2 h + 1 the low byte.
struct QueryCodes {
  u32 digits[QK_BLOCKS][UNITS][2];
  float unit[QK_BLOCKS];          // what one sixteenth of a fixed-point unit adds to a log2 weight, for this lane's heads
  float sums[QK_BLOCKS][GROUPS];  // sum of a group's channels in sixteenths of units, for this lane's heads

  DEVICE void load(const u16* q, i64 head_stride, float sm_scale);
};

// Channel i of the eight that lane l % 4 = c supplies to product u.
DEVICE int query_channel(int unit, int c, int i) {
  if (HEAD_DIM == 64) return (2 * unit + i / 4) * PLANE + 4 * c + i % 4;
  return unit % 4 * PLANE + unit / 4 * 32 + 8 * c + i;
}
// Products run over planes first; the group of product u.
DEVICE constexpr int group_of_unit(int unit) {
  return HEAD_DIM == 64 ? 32 * unit / GROUP : (unit % 4 * PLANE + unit / 4 * 32) / GROUP;
}
// Whether the codes of product u lie at bits 4-7 of their byte, and whether those of channel i are the upper ones there.
DEVICE constexpr int nibble_of_unit(int unit) { return HEAD_DIM == 64 ? unit : unit % 4 / 2; }
DEVICE constexpr bool is_high_code(int unit, int i) { return HEAD_DIM == 64 ? i / 4 : unit % 2; }

DEVICE void QueryCodes::load(const u16* q, i64 head_stride, float sm_scale) {
  int lane = threadIdx.x % 32, column = lane / 4, c = lane % 4;
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    int head = 4 * b + column / 2;
    const u16* row = q + (head < GQA ? head : 0) * head_stride;
    float x[UNITS][8];
    float peak = 1e-30f, part[GROUPS];
    for (float& p : part) p = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        u32 pair = head < GQA ? *(const u32*)(row + query_channel(u, c, i)) : 0;
        x[u][i] = low_half<Q_BF16>(pair);
        x[u][i + 1] = high_half<Q_BF16>(pair);
        peak = fmaxf(peak, fmaxf(fabsf(x[u][i]), fabsf(x[u][i + 1])));
        part[group_of_unit(u)] += x[u][i] + x[u][i + 1];
      }
    for (int step = 1; step < 4; step *= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, step));
      for (float& p : part) p += __shfl_xor_sync(FULL_WARP, p, step);
    }
    float factor = 32512.0f / peak;  // so that the high byte is at most 127
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float scaled = x[u][4 * half + i] * factor;
          int fixed = __float2int_rn(is_high_code(u, 4 * half + i) ? scaled * 0.25f : scaled);
          int low = (int)(signed char)(fixed & 255);
          int digit = column % 2 ? low : (fixed - low) >> 8;
          word |= (u32)(digit & 255) << (8 * i);
        }
        digits[b][u][half] = word;
      }
    // This lane's head is that of columns 2 (l % 4) and 2 (l % 4) + 1, which lane 8 (l % 4) has just prepared.
    unit[b] = sm_scale * LOG2_E / 16 / __shfl_sync(FULL_WARP, factor, 8 * c);
    for (int g = 0; g < GROUPS; g++) sums[b][g] = __shfl_sync(FULL_WARP, part[g] * factor * 16, 8 * c);
  }
}

struct Param {
  float scale, zero;
};

DEVICE void load_params(Param (&params)[GROUPS], u32 address) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if (SCALE_BYTES == 4) {
      params[g] = {as_float(load_shared(address + 8 * g)), as_float(load_shared(address + 8 * g + 4))};
    } else {
      u32 word = load_shared(address + 4 * g);
      params[g] = {low_half<SCALE_BF16>(word), high_half<SCALE_BF16>(word)};
    }
  }
}

// Where this lane reads in a tile; byte offsets of this warp's kv head.
struct Lane {
  int key, value_even, value_odd, params;

  DEVICE explicit Lane(int head) {
    int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
    int codes = head * CODE_BYTES;
    key = token_of_row(row) * ROW_BYTES + codes + (HEAD_DIM == 64 ? 4 : 8) * c;
    int value = codes + (HEAD_DIM == 64 ? 2 : 4) * row;
    value_even = token_of_row(2 * c) * ROW_BYTES + value;
    value_odd = token_of_row(2 * c + 1) * ROW_BYTES + value;
    params = token_of_row(row) * ROW_BYTES + PARAMS_OFFSET + head * PARAM_BYTES;
  }
};

// Products of the 16 tokens at ``tile`` with all queries: per group, and per nibble of the keys' bytes.
using KeyProducts = int[GROUPS][2][QK_BLOCKS][4];

DEVICE void key_products(KeyProducts& out, const QueryCodes& q, u32 tile) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
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
  constexpr u32 PLANES[4] = {0x03030303u, 0x0c0c0c0cu, 0x30303030u, 0xc0c0c0c0u};
  if (HEAD_DIM == 64) {
    u32 w = load_shared(tile), x = load_shared(tile + 8 * ROW_BYTES);
#pragma unroll
    for (int u = 0; u < 2; u++)
      multiply(u, w & PLANES[2 * u], x & PLANES[2 * u], w & PLANES[2 * u + 1], x & PLANES[2 * u + 1]);
  } else {
#pragma unroll
    for (int span = 0; span < HEAD_DIM / 128; span++) {
      u32 at = tile + 32 * span;
      uint2 w, x;
      if (ROW_BYTES % 8 == 0) {
        w = load_shared2(at), x = load_shared2(at + 8 * ROW_BYTES);
      } else {
        w = make_uint2(load_shared(at), load_shared(at + 4));
        x = make_uint2(load_shared(at + 8 * ROW_BYTES), load_shared(at + 8 * ROW_BYTES + 4));
      }
#pragma unroll
      for (int u = 0; u < 4; u++)
        multiply(4 * span + u, w.x & PLANES[u], x.x & PLANES[u], w.y & PLANES[u], x.y & PLANES[u]);
    }
  }
}

// The product of token row 8 j + l / 4 with this lane's head of a block, in sixteenths of units.
DEVICE float key_product(const KeyProducts& products, int group, int block, int j) {
  auto whole = [&](int nibble) { return products[group][nibble][block][2 * j] * 256 + products[group][nibble][block][2 * j + 1]; };
  return __int2float_rn(whole(0) * 16 + whole(1));
}

// Weighted sums of the values of the 16 tokens at ``tile``; columns[g] are the weights times the scales of group g.
DEVICE void value_products(
    State& state, const u32 (&columns)[GROUPS][PV_BLOCKS][2], u32 tile_even, u32 tile_odd) {
  auto multiply = [&](int group, int index, u32 mixed0, u32 mixed1) {  // 16 codes of two tokens each
    u32 next0 = mixed0 >> 8, next1 = mixed1 >> 8;
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
      u32 mask = 0x00030003u << (2 * plane);
      int g = GROUPS == 1 ? 0 : (plane * PLANE + group) / GROUP;
#pragma unroll
      for (int n = 0; n < PV_BLOCKS; n++)
        mma_k16<false>(state.acc[n][4 * index + plane], mixed0 & mask, next0 & mask, mixed1 & mask, next1 & mask,
                       columns[g][n][0], columns[g][n][1]);
    }
  };
  if (HEAD_DIM == 64) {
    u32 mixed[2];
#pragma unroll
    for (int set = 0; set < 2; set++) {
      u32 at = 8 * set * ROW_BYTES;
      mixed[set] = __byte_perm(load_shared_u16(tile_even + at), load_shared_u16(tile_odd + at), 0x5410);
    }
    multiply(0, 0, mixed[0], mixed[1]);
  } else {
#pragma unroll
    for (int span = 0; span < HEAD_DIM / 128; span++) {
      u32 even0 = load_shared(tile_even + 32 * span), odd0 = load_shared(tile_odd + 32 * span);
      u32 even1 = load_shared(tile_even + 32 * span + 8 * ROW_BYTES);
      u32 odd1 = load_shared(tile_odd + 32 * span + 8 * ROW_BYTES);
      multiply(32 * span, 2 * span, __byte_perm(even0, odd0, 0x5410), __byte_perm(even1, odd1, 0x5410));
      multiply(32 * span, 2 * span + 1, __byte_perm(even0, odd0, 0x7632), __byte_perm(even1, odd1, 0x7632));
    }
  }
}

// Weights of 32 tokens as columns of products with values, eight tokens to a row; see columns_of.
struct Weights {
  float plain[TILE / 8][QK_BLOCKS];
  u32 scaled[TILE / 16][GROUPS][PV_BLOCKS][2];  // times value scale and factor: two float16 numbers

  // Whether a number is 2 or more, infinite or NaN: its second bit tells.
  DEVICE bool too_large() const {
    u32 bits = 0;
    for (const auto& pair : scaled)
      for (const auto& group : pair)
        for (const auto& block : group) bits |= block[0] | block[1];
    return bits & 0x40004000u;
  }
};

// The tile's tokens [live_begin, live_end) count; the rest of the tile may hold anything.
DEVICE void attend_history(
    State& state, const QueryCodes& q, const Lane& lane, u32 keys, u32 values, int live_begin, int live_end) {
  constexpr int ROWS = TILE / 8;
  Param value_params[ROWS][GROUPS];
  float logits[ROWS][QK_BLOCKS];  // in sixteenths of the query's units
#pragma unroll
  for (int i = 0; i < ROWS; i += 2) {
    KeyProducts products;
    key_products(products, q, keys + lane.key + 8 * i * ROW_BYTES);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      Param key_params[GROUPS];
      u32 offset = lane.params + 8 * (i + j) * ROW_BYTES;
      load_params(key_params, keys + offset);
      load_params(value_params[i + j], values + offset);
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++) {
        logits[i + j][b] = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
          logits[i + j][b] +=
              key_params[g].scale * (key_product(products, g, b, j) - key_params[g].zero * q.sums[b][g]);
      }
    }
  }
  if (live_begin > 0 || live_end < TILE) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      int token = token_of_row(threadIdx.x % 32 / 4) + 8 * i;
      if (token < live_begin || token >= live_end) {
        for (int b = 0; b < QK_BLOCKS; b++) logits[i][b] = minus_infinity();
        for (int g = 0; g < GROUPS; g++) value_params[i][g] = {0, 0};
      }
    }
  }

  Weights weights;
  for (bool raised = false;; raised = true) {
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int b = 0; b < QK_BLOCKS; b++)
          weights.plain[i + j][b] = exp2_fast(logits[i + j][b] * q.unit[b] - state.top[b]);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float first = value_params[i][g].scale * state.factor, second = value_params[i + 1][g].scale * state.factor;
#pragma unroll
        for (int n = 0; n < PV_BLOCKS; n++) {
          const auto& x = weights.plain[i];
          const auto& y = weights.plain[i + 1];
          u32(&pair)[2] = weights.scaled[i / 2][g][n];
          if (PAIRED) {
            pair[0] = pair[1] = pack_half(x[0] * first, y[0] * second);
          } else {
            pair[0] = pack_half(x[State::left(n)] * first, x[State::right(n)] * first);
            pair[1] = pack_half(y[State::left(n)] * second, y[State::right(n)] * second);
          }
        }
      }
    }
    // Weights beyond their maximum so far, or values with scales beyond theirs, are rare after the first tiles.
    if (raised || !__any_sync(FULL_WARP, weights.too_large())) break;
    float peak[QK_BLOCKS], largest = 0;
    for (int b = 0; b < QK_BLOCKS; b++) {
      peak[b] = LOWEST;
      for (int i = 0; i < ROWS; i++) peak[b] = fmaxf(peak[b], logits[i][b] * q.unit[b]);
    }
    for (int i = 0; i < ROWS; i++)
      for (int g = 0; g < GROUPS; g++) largest = fmaxf(largest, value_params[i][g].scale);
    for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    state.raise(peak, largest * state.factor > 1 ? 0.5f / largest : state.factor);
  }

#pragma unroll
  for (int i = 0; i < ROWS; i++)
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      state.total[b] += weights.plain[i][b];
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        state.shift[b][g] += weights.plain[i][b] * value_params[i][g].scale * value_params[i][g].zero;
    }
#pragma unroll
  for (int i = 0; i < ROWS; i += 2) {
    u32 columns[GROUPS][PV_BLOCKS][2];
    bool odd = threadIdx.x & 4;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int n = 0; n < PV_BLOCKS; n++) {
        const u32(&pair)[2] = weights.scaled[i / 2][g][n];
        if (PAIRED) {
          // Column 2 h gets the weights of the first eight tokens and column 2 h + 1 those of the other eight; each is
          // multiplied with its own eight only, and the two columns are summed in the end.
          u32 both = transpose_8x8(pair[0]);
          columns[g][n][0] = odd ? 0 : both;
          columns[g][n][1] = odd ? both : 0;
        } else {
          columns[g][n][0] = transpose_8x8(pair[0]);
          columns[g][n][1] = transpose_8x8(pair[1]);
        }
      }
    u32 at = values + 8 * i * ROW_BYTES;
    value_products(state, columns, at + lane.value_even, at + lane.value_odd);
  }
}

// What the accumulator of history holds for each unit of output: of the channels of a plane.
DEVICE float history_unit(float factor, int plane) { return factor * ((1 << (2 * plane)) / 16777216.0f); }

// Turns the outputs of a window into an accumulator of history.
DEVICE void begin_history(State& state) {
  state.factor = 1e30f;  // no scale has been seen: the first tile lowers it
#pragma unroll
  for (auto& block : state.acc)
#pragma unroll
    for (int i = 0; i < TILES_M; i++)
#pragma unroll
      for (float& x : block[i]) x *= history_unit(1e30f, i % 4);
}
