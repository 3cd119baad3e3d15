// Sums of weights times value codes in integers, for up to four query heads per kv head.
//
// A byte of a row holds the codes of several channels, four of two bits. With B0 the byte and B1, B2, B3 the byte without
// its lowest one, two, three codes, the codes are B0 - B1, (B1 - B2) / 4, (B2 - B3) / 16 and B3 / 64: three masks yield
// four codes, and the differences are taken of the sums, which is exact. Weights (times value scale) are 16-bit fixed-point numbers in two
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
  // Groups have weights of their own and codes of three bits are put together: then single codes are multiplied.
  static constexpr bool PREFIXES = V_GROUPS == 1 && ValueRows::BITS != 3;

  struct Columns {
    u32 number[TOKENS][V_GROUPS];  // the low 16 bits
  };

  DEVICE void clear() {
    for (auto& tile : sums)
      for (int& x : tile) x = 0;
    factor = 1e30f;  // no weight has been seen: the first tile lowers it
    phase = 0;
  }

  // False if a number does not fit 16 bits, is infinite or NaN.
  DEVICE bool round(Columns& columns, const float (&weights)[TOKENS][1], const Param (&params)[TOKENS][V_GROUPS]) const {
    // The dither: a float from 1 on whose mantissa is, from the top, the token of eight with its three bits reversed, two bits
    // for which of the lane's four tokens it is, and the phase. The 1 is taken off INTEGER.
    int row = token_of_row(threadIdx.x % 32 / 4);
    u32 high = 0x3f800000u >> 18 | (row & 1) << 4 | (row & 2) << 2 | (row & 4);
    float offset = as_float(__funnelshift_l(phase, high, 18));
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++) {
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

  DEVICE void add(const Columns& columns, const Lane& lane, u32 even, u32 odd) {
    phase += PHASE_STEP;
    u32 b[V_GROUPS][2];
#pragma unroll
    for (int g = 0; g < V_GROUPS; g++) {
      // Column 2 h gets the high bytes of head h and column 2 h + 1 the low bytes, four tokens to a word.
      u32 first = transpose_8x8(__byte_perm(columns.number[0][g], columns.number[1][g], 0x4051));
      u32 second = transpose_8x8(__byte_perm(columns.number[2][g], columns.number[3][g], 0x4051));
      b[g][0] = __byte_perm(first, second, 0x5410);
      b[g][1] = __byte_perm(first, second, 0x7632);
    }
    // Four bytes of four tokens, and their high bits: codes of a plane's channels from byte ``first`` on.
    auto multiply = [&](int first, int index, const u32(&low)[4], const u32(&high)[4]) {
#pragma unroll
      for (int plane = 0; plane < ValueRows::PLANES; plane++) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          a[i] = PREFIXES ? low[i] & 0x01010101u * (0xffu & (0xffu << (ValueRows::BITS * plane)))
                          : plane_codes<ValueRows>(low[i], high[i], plane);
        int g = V_GROUPS == 1 ? 0 : ValueRows::group(plane, first);
        mma_bytes(sums[ValueRows::PLANES * index + plane], a[0], a[1], a[2], a[3], b[g][0], b[g][1]);
      }
    };
    // From words of a token each, channel by channel, to words of a channel each, token by token.
    auto turn = [](u32(&out)[4], const u32(&x)[4], const u32(&y)[4], u32 select) {
      u32 x01 = __byte_perm(x[0], x[1], select), x23 = __byte_perm(x[2], x[3], select);
      u32 y01 = __byte_perm(y[0], y[1], select), y23 = __byte_perm(y[2], y[3], select);
      out[0] = __byte_perm(x01, x23, 0x5410), out[1] = __byte_perm(x01, x23, 0x7632);
      out[2] = __byte_perm(y01, y23, 0x5410), out[3] = __byte_perm(y01, y23, 0x7632);
    };
    constexpr int NEXT = 8 * ValueRows::ROW_BYTES;
    constexpr u32 SELECT[2] = {0x5140, 0x7362};
    constexpr bool HAS_HIGH = ValueRows::BITS == 3;
    u32 x[4], y[4], x_high[4], y_high[4], low[4], high[4] = {};
    if (ValueRows::NARROW) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[i] = load_shared_u16(even + NEXT * i);
        y[i] = load_shared_u16(odd + NEXT * i);
        if (HAS_HIGH) {
          x_high[i] = load_shared_u16(even + lane.value_high + NEXT * i) >> lane.value_shift;
          y_high[i] = load_shared_u16(odd + lane.value_high + NEXT * i) >> lane.value_shift;
        }
      }
      turn(low, x, y, SELECT[0]);
      if (HAS_HIGH) turn(high, x_high, y_high, SELECT[0]);
      multiply(0, 0, low, high);
    } else {
#pragma unroll
      for (int span = 0; span < ValueRows::SPANS; span++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          x[i] = load_word<ValueRows>(even + 32 * span + NEXT * i);
          y[i] = load_word<ValueRows>(odd + 32 * span + NEXT * i);
          if (HAS_HIGH) {
            x_high[i] = load_word<ValueRows>(even + 16 * span + lane.value_high + NEXT * i) >> lane.value_shift;
            y_high[i] = load_word<ValueRows>(odd + 16 * span + lane.value_high + NEXT * i) >> lane.value_shift;
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          turn(low, x, y, SELECT[half]);
          if (HAS_HIGH) turn(high, x_high, y_high, SELECT[half]);
          multiply(32 * span, 2 * span + half, low, high);
        }
      }
    }
  }

  DEVICE void finish(Output& output, const Softmax&, const float*, bool) const {
#pragma unroll
    for (int tile = 0; tile < TILES_M; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int plane = tile % ValueRows::PLANES;
        int sum = PREFIXES && plane < ValueRows::PLANES - 1 ? sums[tile][i] - sums[tile + 1][i] : sums[tile][i];
        output.acc[0][tile][i] = __int2float_rn(sum) * ((i % 2 ? 1.0f : 256.0f) / ValueRows::weight(plane) / factor);
      }
  }
};
