// Vectors to codes where a product on the tensor cores leaves them: four lanes have a vector, a lane has 32 numbers of two.
// Clip and codes are those of oscar_kernels/codec.py, with the roundings of the Triton kernel.
#pragma once

#include "scale.cuh"

constexpr float WHOLE = 8388608.0f;                     // 2^23: what is added to it loses its fraction

// Number e of 32 of this lane's vector i: channel 32 (e / 8) + 8 (lane % 4) + e % 8.
DEVICE constexpr int number(int i, int e) { return e / 2 * 4 + 2 * i + e % 2; }

template <class T, class Operation>
DEVICE T over_vector(T x, Operation operation) {
  x = operation(x, __shfl_xor_sync(FULL_WARP, x, 1));
  return operation(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
DEVICE float sum_of_vector(float x) {
  return over_vector(x, [](float a, float b) { return a + b; });
}
DEVICE u32 largest_of_vector(u32 x) {
  return over_vector(x, [](u32 a, u32 b) { return max(a, b); });
}

// Extremes of both vectors' groups, and their largest magnitudes: NaN where there is one.
template <int GROUPS>
struct Extremes {
  float low[2][GROUPS], high[2][GROUPS], largest[2];

  DEVICE explicit Extremes(const float (&y)[64]) {
    constexpr int SIZE = 32 / GROUPS;  // numbers of a lane
    // Bits of floats order as integers do: positive ones as signed, negative ones, the smallest last, as unsigned. Of
    // integers the largest of three is one instruction.
    bool one_sign = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 top = 0;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        u32 first = __float_as_uint(y[number(i, SIZE * g)]), unsigned_most = first;
        int signed_most = (int)first;
#pragma unroll
        for (int e = SIZE * g + 1; e < SIZE * (g + 1); e++) {
          u32 bits = __float_as_uint(y[number(i, e)]);
          unsigned_most = max(unsigned_most, bits);
          signed_most = max(signed_most, (int)bits);
        }
        unsigned_most = largest_of_vector(unsigned_most);
        signed_most = over_vector(signed_most, [](int a, int b) { return max(a, b); });
        one_sign |= signed_most < 0 || (int)unsigned_most >= 0;
        top = max(top, max(unsigned_most & 0x7fffffffu, signed_most < 0 ? 0u : (u32)signed_most));
        low[i][g] = as_float(unsigned_most), high[i][g] = as_float((u32)signed_most);
      }
      largest[i] = as_float(top);
    }
    if (!__any_sync(FULL_WARP, one_sign || largest[0] != largest[0] || largest[1] != largest[1])) return;
    auto larger = [](float a, float b) { return fmaxf(a, b); };
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float most = minus_infinity(), least = minus_infinity();  // the smallest negated
#pragma unroll
        for (int e = SIZE * g; e < SIZE * (g + 1); e++) {
          most = fmaxf(most, y[number(i, e)]);
          least = fmaxf(least, -y[number(i, e)]);
        }
        high[i][g] = over_vector(most, larger), low[i][g] = -over_vector(least, larger);
      }
  }
};

// Magnitudes of a vector that are no less.
DEVICE int reached(const float (&y)[64], int i, float threshold) {
  int below = 0;
#pragma unroll
  for (int e = 0; e < 32; e++) below += (int)(__float_as_uint(fabsf(y[number(i, e)]) - threshold) >> 31);
  return HEAD_DIM - over_vector(below, [](int a, int b) { return a + b; });
}

// The next smaller magnitude.
DEVICE float next_smaller(const float (&y)[64], int i, float threshold) {
  float near = 0;
#pragma unroll
  for (int e = 0; e < 32; e++) {
    float size = fabsf(y[number(i, e)]);
    near = fmaxf(near, size < threshold ? size : 0.0f);
  }
  return over_vector(near, [](float a, float b) { return fmaxf(a, b); });
}

// From the largest magnitudes of both vectors to the rank-th largest, duplicates counted, in ``steps``.
DEVICE void walk_down(const float (&y)[64], float (&threshold)[2], int steps, int rank) {
  float first[2] = {threshold[0], threshold[1]};
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    // Of differences below zero the one next to it is the smallest signed integer. It is exact within a factor of two.
    int near[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 32; e++)
#pragma unroll
      for (int i = 0; i < 2; i++) near[i] = min(near[i], (int)__float_as_uint(fabsf(y[number(i, e)]) - threshold[i]));
    float next[2];
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float down = as_float((u32)over_vector(near[i], [](int a, int b) { return min(a, b); }));
      far |= !(down >= -0.5f * threshold[i]);
      next[i] = threshold[i] + down;
    }
    if (__any_sync(FULL_WARP, far)) {
#pragma unroll
      for (int i = 0; i < 2; i++) next[i] = next_smaller(y, i, threshold[i]);
    }
    threshold[0] = next[0], threshold[1] = next[1];
  }
  // One after the other: votes also keep them out of each other's registers.
  if (__all_sync(FULL_WARP, reached(y, 0, threshold[0]) == rank) &&
      __all_sync(FULL_WARP, reached(y, 1, threshold[1]) == rank))
    return;
  // Some magnitudes occur twice.
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float at = first[i];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      bool enough = reached(y, i, at) >= rank;
      if (__all_sync(FULL_WARP, enough)) break;
      float next = next_smaller(y, i, at);
      at = enough ? at : next;
    }
    threshold[i] = at;
  }
}

// The same of numbers that were 16 bits. Of 128 of them some magnitudes occur twice as a rule, which takes longest; but
// floats have more bits, and with its channel in the lowest ones each magnitude occurs once.
DEVICE void walk_down_apart(float (&y)[64], float (&threshold)[2], int rank) {
  constexpr u32 CHANNEL = HEAD_DIM - 1;
  // With more bits an infinite number is none.
  bool finite = threshold[0] < as_float(0x7f800000u) && threshold[1] < as_float(0x7f800000u);
  if (!__all_sync(FULL_WARP, finite)) return walk_down(y, threshold, rank - 1, rank);
  u32 lane = 8 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int e = 0; e < 32; e++) {
      float& x = y[number(i, e)];
      x = as_float(__float_as_uint(x) | lane | (u32)(e / 8 * 32 + e % 8));
    }
    threshold[i] = as_float(__float_as_uint(threshold[i]) + HEAD_DIM);  // above all of them
  }
  walk_down(y, threshold, rank, rank);
#pragma unroll
  for (float& x : y) x = as_float(__float_as_uint(x) & ~CHANNEL);
  for (float& x : threshold) x = as_float(__float_as_uint(x) & ~CHANNEL);
}

// The rank-th largest magnitude of both vectors, duplicates counted; ``threshold`` are the largest. ``NARROW``: numbers
// were 16 bits.
template <bool NARROW>
DEVICE void find_thresholds(float (&y)[64], float (&threshold)[2], int rank) {
  if (rank > 16) {
    u32 found[2] = {0, 0};
#pragma unroll 1
    for (u32 bit = 1u << 30; bit > 0; bit >>= 1)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (reached(y, i, as_float(found[i] | bit)) >= rank) found[i] |= bit;
    threshold[0] = as_float(found[0]), threshold[1] = as_float(found[1]);
  } else if (NARROW) {
    walk_down_apart(y, threshold, rank);
  } else {
    walk_down(y, threshold, rank - 1, rank);
  }
}

// This lane's part of a vector's codes as they lie in a row: sums of codes at their bits, 16 bits each, exact in floats.
template <class Rows>
struct PackedCodes {
  static constexpr int WORDS = Rows::PLANES == 2 ? 4 : 2;
  float halves[2 * WORDS], high[2];  // of three bits the low two, and the others

  DEVICE PackedCodes() {
#pragma unroll
    for (int n = 0; n < 2 * WORDS; n++) halves[n] = 0;
    high[0] = high[1] = 0;
  }

  DEVICE void add(int e, float code) {
    int span = e / 8, pair = e % 8 / 2, shift = 8 * (e % 2);
    if (Rows::BITS == 4) {
      halves[span % 2 * 4 + pair] += code * (float)(1 << (4 * (span / 2) + shift));
    } else if (Rows::BITS == 3) {
      float top = __saturatef(code - 3.0f);  // 1 from 4 on
      halves[pair] += (code - 4.0f * top) * (float)(1 << (2 * span + shift));
      high[pair % 2] += top * (float)(1 << ((2 * span + 2) % 8 + pair / 2 + shift));
    } else {
      halves[pair] += code * (float)(1 << (2 * span + shift));
    }
  }

  DEVICE static u32 word(float low, float high) {
    return (__float_as_uint(low + WHOLE) & 0xffffu) | __float_as_uint(high + WHOLE) << 16;
  }

  // ``to``: codes of the head.
  DEVICE void write(u8* to, bool broken) const {
    int c = threadIdx.x % 4;
#pragma unroll
    for (int w = 0; w < WORDS; w += 2) {
      u32* at = (u32*)(to + 16 * w + 8 * c);
      uint2 both = make_uint2(word(halves[2 * w], halves[2 * w + 1]), word(halves[2 * w + 2], halves[2 * w + 3]));
      if (broken) both = make_uint2(0, 0);
      if (Rows::ROW_BYTES % 8 == 0) *(uint2*)at = both;
      else at[0] = both.x, at[1] = both.y;
    }
    if (Rows::BITS == 3) *(u32*)(to + Rows::WIDTH + 4 * c) = broken ? 0 : word(high[0], high[1]);
  }
};

// Quantizes vector i and writes it to a row, if it is ``live``: lanes of others take part in sums.
template <bool FITTED, class Rows>
DEVICE void quantize_vector(const float (&y)[64], int i, const Extremes<Rows::GROUPS>& of, float threshold, float gain,
                            u8* row, int head, bool live) {
  constexpr int GROUPS = Rows::GROUPS, SIZE = 32 / GROUPS;
  constexpr float STEPS = (1 << Rows::BITS) - 1;
  bool broken = of.largest[i] != of.largest[i];
  PackedCodes<Rows> packed;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    float low = fminf(fmaxf(of.low[i][g], -threshold), threshold);
    float high = fminf(fmaxf(of.high[i][g], -threshold), threshold);
    float scale = __fdiv_rn(fmaxf(high - low, 1e-8f), STEPS);
    // Keeps zero = -low / scale within float16.
    if (SCALE_BYTES == 2 && !SCALE_BF16) scale = fmaxf(scale, fmaxf(fabsf(low), fabsf(high)) * (1.0f / 32768));
    scale = stored(storable(scale));
    float zero = stored(__fdiv_rn(-low, scale));
    float inverse = __fdiv_rn(1.0f, scale), half = __fadd_rn(zero, 0.5f);
    // Codes grow with numbers: those of the ends of the clipped range bound all others, which so need no clip.
    auto level = [&](float x) { return __fadd_rn(__fmul_rn(x, inverse), half); };
    float first = fminf(fmaxf(level(low), 0.0f), STEPS + 0.5f), last = fminf(fmaxf(level(high), 0.0f), STEPS + 0.5f);
    // Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
    float middle = 0.5f * (low + high), rest = 0, squares = 0, codes = 0, along = 0;
#pragma unroll
    for (int e = SIZE * g; e < SIZE * (g + 1); e++) {
      float x = y[number(i, e)];
      float code = add_toward_minus_infinity(fminf(fmaxf(level(x), first), last), WHOLE) - WHOLE;
      packed.add(e, code);
      if (FITTED) {
        x -= middle;
        rest += x;
        squares += x * x;
        codes += code;
        along += code * x;
      }
    }
    if (FITTED) {
      rest = sum_of_vector(rest), squares = sum_of_vector(squares);
      codes = sum_of_vector(codes), along = sum_of_vector(along);
      float mean = rest / Rows::GROUP, mean_code = codes / Rows::GROUP;
      along -= mean_code * rest;
      float fitted = along > 0 ? gain * (squares - mean * rest) / along : scale;
      scale = stored(storable(fminf(fmaxf(fitted, scale * (1 / STRETCH)), scale * STRETCH)));
      zero = stored(mean_code - (middle + mean) / scale);
    }
    if (broken) scale = zero = as_float(0x7fc00000u);
    if (live && threadIdx.x % 4 == g) {
      u32* at = (u32*)(row + Rows::PARAMS_OFFSET + head * Rows::PARAM_BYTES + g * Rows::GROUP_BYTES);
      if (SCALE_BYTES == 4) at[0] = __float_as_uint(scale), at[1] = __float_as_uint(zero);
      else at[0] = narrow_scale(scale) | narrow_scale(zero) << 16;
    }
  }
  if (live) packed.write(row + head * Rows::CODE_BYTES, broken);
}
