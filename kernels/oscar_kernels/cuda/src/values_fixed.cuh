// Sums of weights times value codes in integers, for up to four query heads per kv head.
//
// A byte of a row holds the codes of four channels. With B0 the byte and B1, B2, B3 the byte without its lowest one, two,
// three codes, the codes are B0 - B1, (B1 - B2) / 4, (B2 - B3) / 16 and B3 / 64: three masks yield four codes, and the
// differences are taken of the sums, which is exact. Weights (times value scale) are 16-bit fixed-point numbers in two
// columns, high byte and low byte.
//
// They are rounded down after dithering: a number between 0 and 1 that is added before, spread evenly over the tokens of a
// tile and shifted from tile to tile, so that rounding is unbiased for weights of any size. A million weights of a
// thousandth of a unit still add up to a thousand units.
//
// Every head has a unit of its own. It grows when a weight does not fit 16 bits (scale), and when a sum might overflow
// (make_room): then a head's sums are so large that what a unit is worth does not matter to them.
#pragma once

#include "tile.cuh"

struct FixedValues {
  int sums[TILES_M][4];
  float factor;  // weights times value scale times this are the fixed-point numbers, for this lane's head
  u32 phase;     // of the dither: its fraction of the distance between neighbouring offsets, as a fraction of 2^32

  static constexpr float PEAK = 16384;       // of the fixed-point numbers, at the largest product of weight and value scale
  static constexpr float INTEGER = 8388608;  // 2^23: above it, the bits of a float count in ones
  static constexpr u32 PHASE_STEP = 0x9e3779b9;  // the golden ratio: phases of successive tiles fill their range evenly
  // A tile adds at most 32 * 255 * 255 < 2^21 to a sum, and a run of stages less than 2^29. Sums below FULL after one run
  // are below 2^31 after the next.
  static constexpr int RUN_STAGES = 256;
  static constexpr int FULL = 1 << 30;
  static constexpr bool PREFIXES = GROUPS == 1;  // groups have weights of their own: then only single codes are multiplied

  struct Columns {
    u32 number[TOKENS][GROUPS];  // the low 16 bits
  };

  DEVICE void clear() {
    for (auto& tile : sums)
      for (int& x : tile) x = 0;
    factor = 1e30f;  // no weight has been seen: the first tile lowers it
    phase = 0;
  }

  // False if a number does not fit 16 bits, is infinite or NaN.
  DEVICE bool round(Columns& columns, const float (&weights)[TOKENS][1], const Param (&params)[TOKENS][GROUPS]) const {
    // The dither: a float from 1 on whose mantissa is, from the top, the token of eight with its three bits reversed, two bits
    // for which of the lane's four tokens it is, and the phase. The 1 is taken off INTEGER.
    int row = token_of_row(threadIdx.x % 32 / 4);
    u32 high = 0x3f800000u >> 18 | (row & 1) << 4 | (row & 2) << 2 | (row & 4);
    float offset = as_float(__funnelshift_l(phase, high, 18));
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float x = weights[i][0] * params[i][g].scale * factor + (i == 0 ? offset : offset + (i % 2 * 2 + i / 2) / 32.0f);
        columns.number[i][g] = __float_as_uint(add_toward_zero(x, INTEGER - 1));
        bits |= columns.number[i][g];
      }
    return !(bits & 0x34ff0000u);  // bits 16 to 22, and those that the exponent of 2^23 has not and every larger one has
  }

  // A new unit after the running maximum was raised; ``largest`` is this tile's largest weight times value scale. What has
  // been summed up was at most 4 PEAK, times the fade: the unit is as small as both allow, so a value of a large scale
  // that the maximum has left behind costs no resolution.
  DEVICE void scale(const Softmax::Fade& fade, float largest) {
    float old = factor;
    factor = fminf(PEAK / fmaxf(largest, 1e-30f), old / fade.of[0]);
    shrink(fade.of[0] * (factor / old));
  }

  // Keeps the sums from overflowing. Where one of a head is FULL, its weights so far and to come are half of what they were.
  DEVICE void make_room(Softmax& softmax, float*, bool) {
    int largest = 0;
#pragma unroll
    for (const auto& tile : sums)
      for (int x : tile) largest = max(largest, x);
    for (int step = 4; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    if (largest < FULL) return;
    softmax.halve();
    shrink(0.5f);
  }

  DEVICE void shrink(float ratio) {
#pragma unroll
    for (auto& tile : sums)
#pragma unroll
      for (int& x : tile) x = __float2int_rn(__int2float_rn(x) * ratio);
  }

  DEVICE void add(const Columns& columns, u32 even, u32 odd) {
    phase += PHASE_STEP;
    u32 b[GROUPS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      // Column 2 h gets the high bytes of head h and column 2 h + 1 the low bytes, four tokens to a word.
      u32 first = transpose_8x8(__byte_perm(columns.number[0][g], columns.number[1][g], 0x4051));
      u32 second = transpose_8x8(__byte_perm(columns.number[2][g], columns.number[3][g], 0x4051));
      b[g][0] = __byte_perm(first, second, 0x5410);
      b[g][1] = __byte_perm(first, second, 0x7632);
    }
    auto multiply = [&](int first_channel, int index, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
      for (int plane = 0; plane < 4; plane++) {
        u32 mask = 0x01010101u * (PREFIXES ? 0xffu & (0xffu << (2 * plane)) : 3u << (2 * plane));
        int g = GROUPS == 1 ? 0 : (plane * PLANE + first_channel) / GROUP;
        mma_bytes(sums[4 * index + plane], a0 & mask, a1 & mask, a2 & mask, a3 & mask, b[g][0], b[g][1]);
      }
    };
    if (HEAD_DIM == 64) {
      u32 x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[i] = load_shared_u16(even + 8 * i * ROW_BYTES);
        y[i] = load_shared_u16(odd + 8 * i * ROW_BYTES);
      }
      u32 x01 = __byte_perm(x[0], x[1], 0x5140), x23 = __byte_perm(x[2], x[3], 0x5140);
      u32 y01 = __byte_perm(y[0], y[1], 0x5140), y23 = __byte_perm(y[2], y[3], 0x5140);
      multiply(0, 0, __byte_perm(x01, x23, 0x5410), __byte_perm(x01, x23, 0x7632), __byte_perm(y01, y23, 0x5410),
               __byte_perm(y01, y23, 0x7632));
    } else {
#pragma unroll
      for (int span = 0; span < HEAD_DIM / 128; span++) {
        u32 x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          x[i] = load_shared(even + 32 * span + 8 * i * ROW_BYTES);
          y[i] = load_shared(odd + 32 * span + 8 * i * ROW_BYTES);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          constexpr u32 SELECT[2] = {0x5140, 0x7362};
          u32 x01 = __byte_perm(x[0], x[1], SELECT[half]), x23 = __byte_perm(x[2], x[3], SELECT[half]);
          u32 y01 = __byte_perm(y[0], y[1], SELECT[half]), y23 = __byte_perm(y[2], y[3], SELECT[half]);
          multiply(32 * span, 2 * span + half, __byte_perm(x01, x23, 0x5410), __byte_perm(x01, x23, 0x7632),
                   __byte_perm(y01, y23, 0x5410), __byte_perm(y01, y23, 0x7632));
        }
      }
    }
  }

  DEVICE void finish(Output& output, const Softmax&, const float*, bool) const {
#pragma unroll
    for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int plane = tile % 4;
        int sum = PREFIXES && plane < 3 ? sums[tile][i] - sums[tile + 1][i] : sums[tile][i];
        output.acc[0][tile][i] = __int2float_rn(sum) * ((i % 2 ? 1.0f : 256.0f) / (1 << (2 * plane)) / factor);
      }
  }
};
