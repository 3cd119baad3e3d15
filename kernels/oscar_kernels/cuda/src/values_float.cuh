// Sums of weights times value codes in floats, for more than four query heads per kv head.
//
// The code at bits n.. of a 16-bit half is the subnormal float16 number code 2^n 2^-24. The tensor cores multiply subnormals
// exactly, and the end of the segment divides 2^n 2^-24 out.
//
// They cut sums off instead of rounding them, a bias that grows with the number of products: 1% after 30,000. So sums move
// to memory and begin anew every 2,000 products, where they are added up with rounding.
#pragma once

#include "tile.cuh"

struct FloatValues {
  Output sums;
  float factor;  // the sums are of weights times value scale times this, for this lane's heads

  // Weights times value scale as columns of the products: column 2 c is head c of an output block, column 2 c + 1 head 4 + c.
  struct Columns {
    u32 pair[TOKENS][V_GROUPS][PV_BLOCKS];  // two float16 numbers
  };

  DEVICE void clear() {
    sums.clear();
    factor = 1e30f;  // no weight has been seen: the first tile lowers it
  }

  // False if a number is 2 or more, infinite or NaN.
  DEVICE bool round(Columns& columns, const float (&weights)[TOKENS][QK_BLOCKS], const Param (&params)[TOKENS][V_GROUPS]) const {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++) {
        float scale = params[i][g].scale * factor;
#pragma unroll
        for (int n = 0; n < PV_BLOCKS; n++) {
          columns.pair[i][g][n] = pack_half(weights[i][left_block(n)] * scale, weights[i][right_block(n)] * scale);
          bits |= columns.pair[i][g][n];
        }
      }
    return !(bits & 0x40004000u);  // the second bit of a float16 tells
  }

  static constexpr int RUN_STAGES = 1024;  // of two products each
  static constexpr int SPILLED = PV_BLOCKS * TILES_M * 4;

  // Moves the sums to ``spill``, every lane to words of its own, 32 apart, and with them the units that they are in.
  DEVICE void make_room(Softmax& softmax, float* spill, bool first) {
    float ratio[QK_BLOCKS];
    spilled_units(softmax, spill, ratio);
#pragma unroll
    for (int n = 0; n < PV_BLOCKS; n++)
#pragma unroll
      for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float* at = spill + ((n * TILES_M + tile) * 4 + i) * 32;
          float& sum = sums.acc[n][tile][i];
          // What is there before the first time is another segment's.
          *at = first ? sum : sum + *at * ratio[i % 2 ? right_block(n) : left_block(n)];
          sum = 0;
        }
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) spill[(SPILLED + b) * 32] = softmax.top[b];
    spill[(SPILLED + QK_BLOCKS) * 32] = factor;
  }

  // What spilled sums are multiplied by to be in today's units.
  DEVICE void spilled_units(const Softmax& softmax, const float* spill, float (&ratio)[QK_BLOCKS]) const {
    float change = factor / spill[(SPILLED + QK_BLOCKS) * 32];
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) ratio[b] = exp2_fast(spill[(SPILLED + b) * 32] - softmax.top[b]) * change;
  }

  // See FixedValues: here numbers of this lane's heads were below 2, and the largest one is 0.5 from now on.
  DEVICE void scale(const Softmax::Fade& fade, float largest) {
    float old = factor, kept = 0;
    for (float x : fade.of) kept = fmaxf(kept, x);
    factor = fminf(0.5f / fmaxf(largest, 1e-30f), old / kept);
    sums.scale(fade, factor / old);
  }

  DEVICE void add(const Columns& columns, const Lane& lane, u32 even, u32 odd) {
#pragma unroll
    for (int i = 0; i < TOKENS; i += 2) {
      u32 b[V_GROUPS][PV_BLOCKS][2];
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++)
#pragma unroll
        for (int n = 0; n < PV_BLOCKS; n++) {
          b[g][n][0] = transpose_8x8(columns.pair[i][g][n]);
          b[g][n][1] = transpose_8x8(columns.pair[i + 1][g][n]);
        }
      // Two bytes each of two tokens and of the two eight tokens on, and their high bits.
      auto multiply = [&](int first, int index, const u32(&low)[2], const u32(&high)[2]) {
#pragma unroll
        for (int plane = 0; plane < ValueRows::PLANES; plane++) {
          u32 a[4];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            a[j] = plane_codes<ValueRows>(low[j], high[j], plane) & 0x00ff00ffu;
            a[2 + j] = plane_codes<ValueRows>(low[j] >> 8, high[j] >> 8, plane) & 0x00ff00ffu;
          }
          int g = V_GROUPS == 1 ? 0 : ValueRows::group(plane, first);
#pragma unroll
          for (int n = 0; n < PV_BLOCKS; n++)
            mma_k16<false>(sums.acc[n][ValueRows::PLANES * index + plane], a[0], a[2], a[1], a[3], b[g][n][0], b[g][n][1]);
        }
      };
      constexpr int NEXT = 8 * ValueRows::ROW_BYTES;
      constexpr u32 SELECT[2] = {0x5410, 0x7632};
      constexpr bool HAS_HIGH = ValueRows::BITS == 3;
      u32 at = i * NEXT, low[2], high[2] = {};
      if (ValueRows::NARROW) {
#pragma unroll
        for (int j = 0; j < 2; j++, at += NEXT) {
          low[j] = __byte_perm(load_shared_u16(even + at), load_shared_u16(odd + at), SELECT[0]);
          if (HAS_HIGH)
            high[j] = __byte_perm(load_shared_u16(even + lane.value_high + at),
                                  load_shared_u16(odd + lane.value_high + at), SELECT[0]) >> lane.value_shift;
        }
        multiply(0, 0, low, high);
      } else {
#pragma unroll
        for (int span = 0; span < ValueRows::SPANS; span++) {
          u32 x[2], y[2], x_high[2], y_high[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            x[j] = load_word<ValueRows>(even + 32 * span + at + j * NEXT), y[j] = load_word<ValueRows>(odd + 32 * span + at + j * NEXT);
            if (HAS_HIGH) {
              x_high[j] = load_word<ValueRows>(even + 16 * span + lane.value_high + at + j * NEXT) >> lane.value_shift;
              y_high[j] = load_word<ValueRows>(odd + 16 * span + lane.value_high + at + j * NEXT) >> lane.value_shift;
            }
          }
#pragma unroll
          for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              low[j] = __byte_perm(x[j], y[j], SELECT[half]);
              if (HAS_HIGH) high[j] = __byte_perm(x_high[j], y_high[j], SELECT[half]);
            }
            multiply(32 * span, 2 * span + half, low, high);
          }
        }
      }
    }
  }

  DEVICE void finish(Output& output, const Softmax& softmax, const float* spill, bool spilled) {
    if (spilled) {
      float ratio[QK_BLOCKS];
      spilled_units(softmax, spill, ratio);
#pragma unroll
      for (int n = 0; n < PV_BLOCKS; n++)
#pragma unroll
        for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            sums.acc[n][tile][i] +=
                spill[((n * TILES_M + tile) * 4 + i) * 32] * ratio[i % 2 ? right_block(n) : left_block(n)];
    }
    float unit = 16777216.0f / factor;
#pragma unroll
    for (int n = 0; n < PV_BLOCKS; n++)
#pragma unroll
      for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) output.acc[n][tile][i] = sums.acc[n][tile][i] * (unit / ValueRows::weight(tile % ValueRows::PLANES));
  }
};
