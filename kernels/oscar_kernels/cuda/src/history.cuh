// Attention of one warp to 32 tokens of quantized history.
//
// Keys: S' = K Q', integer products. The keys' codes are bytes as they lie in the row, masked but not moved: a code that
// begins at bit 0 of a byte is worth itself, one at bit 2 four times that, which the query divides out; those from bit 4 on
// are worth 16 times as much and have sums of their own. Queries are 16-bit fixed-point numbers in two columns, high byte and
// low byte, so their rounding is finer than that of bfloat16.
// Values: O' = V' P', see values_fixed.cuh and values_float.cuh.
// Scales and zero points never touch a code: q.k = s (q.c - z sum(q)) and sum(p v) = sum((p s) c) - sum(p s z).
#pragma once

#include "query_codes.cuh"
#include "values_fixed.cuh"
#include "values_float.cuh"

// The codes of 16 tokens, this lane's bytes of the rows of two of them, eight apart.
struct KeyWords {
  static constexpr int WORDS = KeyRows::NARROW ? 1 : 2;  // of a span
  static constexpr bool HAS_HIGH = KeyRows::BITS == 3;
  u32 low[KeyRows::SPANS][2][WORDS];
  u32 high[KeyRows::SPANS][2];  // of the first word at even bits, of the second at odd ones

  DEVICE void load(const Lane& lane, u32 tile) {
#pragma unroll
    for (int span = 0; span < KeyRows::SPANS; span++)
#pragma unroll
      for (int row = 0; row < 2; row++) {
        u32 at = tile + 8 * row * KeyRows::ROW_BYTES + 32 * span;
        if (KeyRows::NARROW) {
          low[span][row][0] = load_word<KeyRows>(at);
        } else if (KeyRows::ROW_BYTES % 8 == 0) {
          uint2 two = load_shared2(at);
          low[span][row][0] = two.x, low[span][row][WORDS - 1] = two.y;
        } else {
          low[span][row][0] = load_word<KeyRows>(at), low[span][row][WORDS - 1] = load_word<KeyRows>(at + 4);
        }
        high[span][row] = HAS_HIGH ? load_word<KeyRows>(at - 16 * span + lane.key_high) >> lane.key_shift : 0;
      }
  }

  // Codes of 16 tokens and the 32 channels of a product, as it takes them.
  DEVICE u32 operand(int unit, int row, int half) const {
    int span = KeyRows::NARROW ? 0 : unit / KeyRows::PLANES;
    int plane = KeyRows::NARROW ? 2 * unit + half : unit % KeyRows::PLANES;
    u32 upper = KeyRows::NARROW ? high[span][row] : high[span][row] >> half;
    return plane_codes<KeyRows>(low[span][row][KeyRows::NARROW ? 0 : half], upper, plane);
  }
};

using Keys = Either<HAS_BOOK, BookWords, KeyWords>::type;

// Products of 16 tokens with all queries over the channels of a group, per nibble of the keys' bytes; points have none.
struct KeyProducts {
  int of[HAS_BOOK ? 1 : 2][QK_BLOCKS][4];

  DEVICE void add(const Keys& words, const QueryCodes& q, int group) {
#pragma unroll
    for (auto& nibble : of)
#pragma unroll
      for (auto& block : nibble)
#pragma unroll
        for (int& x : block) x = 0;
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      if (group_of_unit(unit) != group) continue;
      u32 a0 = words.operand(unit, 0, 0), a1 = words.operand(unit, 1, 0);
      u32 a2 = words.operand(unit, 0, 1), a3 = words.operand(unit, 1, 1);
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++) {
        uint2 column = q.column(b, unit);
        if (HAS_BOOK) mma_points(of[0][b], a0, a1, a2, a3, column.x, column.y);
        else mma_codes(of[nibble_of_unit(unit)][b], a0, a1, a2, a3, column.x, column.y);
      }
    }
  }

  // That of token row 8 j + l / 4 with this lane's head of a block, in sixteenths of units, or of points in units.
  DEVICE float whole(int block, int j) const {
    auto both = [&](int nibble) { return of[nibble][block][2 * j] * 256 + of[nibble][block][2 * j + 1]; };
    return __int2float_rn(HAS_BOOK ? both(0) : both(0) * 16 + both(HAS_BOOK ? 0 : 1));
  }
};

// Values of up to four query heads are summed in integers, of more in floats.
using Values = Either<PAIRED, FixedValues, FloatValues>::type;

// What a tile's keys say, before anything is weighed.
struct Scores {
  float logits[TOKENS][QK_BLOCKS];  // in the units of KeyProducts::whole
  Param value_params[TOKENS][V_GROUPS];

  DEVICE void multiply(const QueryCodes& q, const Lane& lane, u32 keys, u32 values) {
    auto load_value_params = [&](int i) {
      load_params<ValueRows>(value_params[i], values + lane.value_params + 8 * i * ValueRows::ROW_BYTES);
    };
#pragma unroll
    for (int i = 0; i < TOKENS; i += 2) {
      Keys words;
      words.load(lane, keys + lane.key + 8 * i * KeyRows::ROW_BYTES);
      Param key_params[2][K_GROUPS];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        load_params<KeyRows>(key_params[j], keys + lane.key_params + 8 * (i + j) * KeyRows::ROW_BYTES);
        if (!WIDE) load_value_params(i + j);
        for (float& x : logits[i + j]) x = 0;
      }
#pragma unroll
      for (int g = 0; g < K_GROUPS; g++) {
        KeyProducts products;
        products.add(words, q, g);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int b = 0; b < QK_BLOCKS; b++)
            logits[i + j][b] += HAS_BOOK ? key_params[j][g].scale * products.whole(b, j)
                                         : key_params[j][g].scale * (products.whole(b, j) - key_params[j][g].zero * q.sums[b][g]);
      }
    }
    // Later where registers are short.
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
      if (WIDE) load_value_params(i);
  }

  // Only the tile's tokens [live_begin, live_end) count; the others may hold anything.
  DEVICE void keep(int live_begin, int live_end) {
    if (live_begin <= 0 && live_end >= TILE) return;
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      int token = token_of_row(threadIdx.x % 32 / 4) + 8 * i;
      if (token < live_begin || token >= live_end) {
        for (int b = 0; b < QK_BLOCKS; b++) logits[i][b] = minus_infinity();
        for (int g = 0; g < V_GROUPS; g++) value_params[i][g] = {0, 0};
      }
    }
  }

  // Weights of the tile's values, which count in the softmax from now on.
  DEVICE void weigh(Values::Columns& columns, Softmax& softmax, Values& sums, const QueryCodes& q) const {
    float weights[TOKENS][QK_BLOCKS];
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
    for (int i = 0; i < TOKENS; i++) {
#pragma unroll
      for (int b = 0; b < QK_BLOCKS; b++) softmax.total[b] += weights[i][b];
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++) {
        float offset = value_params[i][g].scale * value_params[i][g].zero;
#pragma unroll
        for (int b = 0; b < QK_BLOCKS; b++) softmax.shift[b][g] += weights[i][b] * offset;
      }
    }
  }
};
