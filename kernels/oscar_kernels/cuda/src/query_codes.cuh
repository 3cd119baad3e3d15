// Queries as integers, the way products with the codes of keys take them.
#pragma once

#include "book.cuh"

constexpr int QUERY_PEAK = 32512;  // of the fixed-point numbers, so that the high byte is at most 127
// Sums of a group are put together in sixteenths of units, those of points in units, in 32 bits (KeyProducts::whole).
constexpr int FRACTIONS = HAS_BOOK ? 1 : 16;
constexpr int LARGEST_CODE = HAS_BOOK ? 128 : (1 << KeyRows::BITS) - 1;
static_assert(1ll * FRACTIONS * QUERY_PEAK * LARGEST_CODE * KeyRows::GROUP < 1ll << 31, "sums of a group overflow");

// The queries of a kv head as columns of products: column 2 h is the high byte of head h, column 2 h + 1 the low byte.
struct QueryCodes {
  u32 digits[WIDE ? 1 : QK_BLOCKS * UNITS][2];
  u32 at;                         // where WIDE ones lie in shared memory, this lane's words
  float unit[QK_BLOCKS];          // what one in ``whole`` sums adds to a log2 weight, for this lane's heads
  float sums[QK_BLOCKS][K_GROUPS];  // sum of a group's channels in sixteenths of units, for this lane's heads

  // From shared memory, where heads lie side by side. Every warp of the kv head takes part; ``shared`` are DIGIT_BYTES of
  // the head, which none of them reads any more, ``warp`` which of them this is.
  // ``factors`` are those of the head's codebook, in shared memory.
  DEVICE void load(u32 q, float sm_scale, u32 shared, int kv_head, int warp, u32 factors);

  // This lane's words of the columns of a product.
  DEVICE uint2 column(int block, int unit) const {
    int index = block * UNITS + unit;
    if (WIDE) return load_shared2(at + index * 32 * 8);
    return make_uint2(digits[index][0], digits[index][1]);
  }
};

// Channel i of the eight that lane l % 4 = c supplies to product u.
DEVICE int query_channel(int unit, int c, int i) {
  if (HAS_BOOK) return 4 * group_of_slot(2 * unit + i / 4, c) + i % 4;
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
  if (HAS_BOOK) return 1;
  return KeyRows::weight(KeyRows::NARROW ? 2 * unit + i / 4 : unit % KeyRows::PLANES);
}
DEVICE constexpr int nibble_of_unit(int unit) { return code_weight(unit, 0) >= 16; }
DEVICE constexpr bool is_high_code(int unit, int i) { return code_weight(unit, i) % 16 == 4 || code_weight(unit, i) == 64; }

DEVICE void QueryCodes::load(u32 q, float sm_scale, u32 shared, int kv_head, int warp, u32 factors) {
  int lane = threadIdx.x % 32, column = lane / 4, c = lane % 4;
  at = shared + lane * 8;
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
        if (HAS_BOOK) {
          float points = as_float(load_shared(factors + 4 * group_of_slot(2 * u + half, c)));
#pragma unroll
          for (int i = 0; i < 4; i++) x[u][4 * half + i] *= points;
        }
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
    float factor = QUERY_PEAK / peak;
    float integer = column % 2 ? 12582912.0f : 12582912.0f + 128.0f;
    u32 pick = column % 2 ? 0x0040 : 0x0051;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      u32 words[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 fixed[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          fixed[i] = __float_as_uint(
              fmaf(x[u][4 * half + i], is_high_code(u, 4 * half + i) ? factor * 0.25f : factor, integer));
        u32 first = __byte_perm(fixed[0], fixed[1], pick), second = __byte_perm(fixed[2], fixed[3], pick);
        words[half] = __byte_perm(first, second, 0x5410);
      }
      int index = b * UNITS + u;
      if (!WIDE) digits[index][0] = words[0], digits[index][1] = words[1];
      else if (b % TILES_PER_STAGE == warp) store_shared2(at + index * 32 * 8, words[0], words[1]);
    }
    // This lane's head is that of columns 2 (l % 4) and 2 (l % 4) + 1, which lane 8 (l % 4) has just prepared.
    unit[b] = sm_scale * LOG2_E / FRACTIONS / __shfl_sync(FULL_WARP, factor, 8 * c);
    for (int g = 0; g < K_GROUPS; g++) sums[b][g] = __shfl_sync(FULL_WARP, part[g] * factor * 16, 8 * c);
  }
  if (WIDE) named_barrier(1 + kv_head, 32 * TILES_PER_STAGE);
}
