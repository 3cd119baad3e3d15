// Some vectors, by one warp: clip, quantize and pack. The numbers are those of oscar_kernels/codec.py. One vector's steps
// wait for each other, through the warp; those of several are written side by side.
#pragma once

#include "scale.cuh"

// Lane l has bytes l, l + 32, ... of the packed codes, of three bits of the low ones: Rows::channel(plane, byte).
template <class Rows>
struct Vectors {
  static constexpr int BYTES = (Rows::WIDTH + 31) / 32, PLANES = Rows::PLANES;
  float y[BYTES][PLANES];

  DEVICE static bool has_byte(int i) { return Rows::WIDTH % 32 == 0 || threadIdx.x % 32 + 32 * i < Rows::WIDTH; }
};

// Clamps each of N vectors to its rank-th largest magnitude, duplicates counted.
template <class Rows, int N>
DEVICE void clip(Vectors<Rows> (&v)[N], int rank) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES;
  if (rank == 0) return;
  u32 bits[N][BYTES][PLANES], threshold[N];  // of magnitudes, which order as integers do
#pragma unroll
  for (int n = 0; n < N; n++) {
    threshold[n] = 0;
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++) bits[n][i][j] = v[n].has_byte(i) ? __float_as_uint(fabsf(v[n].y[i][j])) : 0;
  }
  if (rank <= 16) {
    // Take the largest away, rank - 1 times.
#pragma unroll 1
    for (int round = 0; round < rank; round++) {
      u32 mine[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        mine[n] = 0;
#pragma unroll
        for (int i = 0; i < BYTES; i++)
#pragma unroll
          for (int j = 0; j < PLANES; j++) mine[n] = max(mine[n], bits[n][i][j]);
      }
#pragma unroll
      for (int n = 0; n < N; n++) threshold[n] = __reduce_max_sync(FULL_WARP, mine[n]);
#pragma unroll
      for (int n = 0; n < N; n++) {
        bool taken = threadIdx.x % 32 != __ffs(__ballot_sync(FULL_WARP, mine[n] == threshold[n])) - 1;
#pragma unroll
        for (int i = 0; i < BYTES; i++)
#pragma unroll
          for (int j = 0; j < PLANES; j++)
            if (!taken && bits[n][i][j] == threshold[n]) {
              bits[n][i][j] = 0;
              taken = true;
            }
      }
    }
  } else {
    for (u32 bit = 1u << 30; bit > 0; bit >>= 1)
#pragma unroll
      for (int n = 0; n < N; n++) {
        u32 trial = threshold[n] | bit;
        int above = 0;
#pragma unroll
        for (int i = 0; i < BYTES; i++)
#pragma unroll
          for (int j = 0; j < PLANES; j++)
            above += __popc(__ballot_sync(FULL_WARP, v[n].has_byte(i) && bits[n][i][j] >= trial));
        if (above >= rank) threshold[n] = trial;
      }
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    float tau = __uint_as_float(threshold[n]);
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++) v[n].y[i][j] = fminf(fmaxf(v[n].y[i][j], -tau), tau);
  }
}

// Sums or extremes of N vectors over the warp, side by side, so that none waits for another.
template <int N, class Operation>
DEVICE void reduce(float (&x)[N], Operation operation) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = operation(x[n], __shfl_xor_sync(FULL_WARP, x[n], step));
}

// Whether a channel of the vector is a NaN, which clip() and minima and maxima pass over.
template <class Rows>
DEVICE bool has_nan(const Vectors<Rows>& v) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < Vectors<Rows>::BYTES; i++)
#pragma unroll
    for (int j = 0; j < Vectors<Rows>::PLANES; j++) found |= v.y[i][j] != v.y[i][j];
  return __any_sync(FULL_WARP, found);
}

// Codes of N vectors as they lie in a row.
template <class Rows, int N>
struct Packed {
  static constexpr int BYTES = Vectors<Rows>::BYTES;
  u32 low[N][BYTES], high[N][BYTES];  // of three bits the low two, and the others where they lie in the first half

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < BYTES; i++) low[n][i] = high[n][i] = 0;
  }

  DEVICE void add(int n, int i, int j, float code) {
    if (Rows::BITS == 3) {
      low[n][i] |= ((u32)code & 3) << (2 * j);
      high[n][i] |= ((u32)code >> 2) << (2 * j + 2) % 8;
    } else {
      low[n][i] |= (u32)code << (Rows::BITS * j);
    }
  }

  DEVICE void write(u8* const (&rows)[N], const int (&heads)[N], const bool (&broken)[N]) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++) {
      u8* to = rows[n] + heads[n] * Rows::CODE_BYTES;
#pragma unroll
      for (int i = 0; i < BYTES; i++) {
        int b = lane + 32 * i;
        if (Vectors<Rows>::has_byte(i)) to[b] = broken[n] ? 0 : low[n][i];
        if (Rows::BITS == 3) {
          // A byte of high bits is of two bytes four apart, the second one bit further up.
          u32 both = high[n][i] | __shfl_xor_sync(FULL_WARP, high[n][i], 4) << 1;
          if (Vectors<Rows>::has_byte(i) && lane / 4 % 2 == 0) to[Rows::WIDTH + b / 8 * 4 + b % 4] = broken[n] ? 0 : both;
        }
      }
    }
  }
};

// A scale fitted to codes without a zero point, see fitted_scale in scales.py: sums are over y^2 and y times what codes say.
DEVICE float fitted_scale(float scale, float gain, float squares, float along) {
  float fitted = along > 0 ? gain * squares / along : scale;
  return fminf(fmaxf(fitted, scale * (1 / STRETCH)), scale * STRETCH);
}

DEVICE void store_scale(u8* at, float scale) {
  if (SCALE_BYTES == 4) *(float*)at = scale;
  else *(u16*)at = narrow_scale(scale);
}

// Symmetric codes, see scales.py; arguments as of quantize().
template <bool FITTED, class Rows, int N>
DEVICE void quantize_symmetric(const Vectors<Rows> (&v)[N], const Vectors<Rows> (&whole)[N], float gain,
                               u8* const (&rows)[N], const int (&heads)[N]) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES, GROUP = Rows::GROUP;
  constexpr float STEP = (Rows::BITS == 2 ? OSCAR_STEP_2 : Rows::BITS == 3 ? OSCAR_STEP_3 : OSCAR_STEP_4) / 1e6f;
  bool broken[N];
  Packed<Rows, N> packed;
#pragma unroll
  for (int n = 0; n < N; n++) broken[n] = has_nan(whole[n]);
  packed.clear();
#pragma unroll
  for (int g = 0; g < Rows::GROUPS; g++) {
    auto mine = [&](int i, int j) { return Rows::group(j, 32 * i) == g; };
    auto sum = [](float a, float b) { return a + b; };
    float squares[N], scale[N], sums[2 * N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      squares[n] = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (mine(i, j)) squares[n] += v[n].y[i][j] * v[n].y[i][j];
    }
    reduce(squares, sum);
#pragma unroll
    for (int n = 0; n < N; n++) {
      scale[n] = stored(storable(fmaxf(sqrtf(squares[n] / GROUP) * STEP, 1e-8f)));
      float length = 0, along = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (mine(i, j)) {
            float code = floorf(__fadd_rn(__fdiv_rn(v[n].y[i][j], scale[n]), Rows::ZERO + 0.5f));
            code = fminf(fmaxf(code, 0.0f), 2 * Rows::ZERO);
            packed.add(n, i, j, code);
            float x = whole[n].y[i][j];
            length += x * x;
            along += x * (code - Rows::ZERO);
          }
      sums[2 * n] = length;
      sums[2 * n + 1] = along;
    }
    if (FITTED) reduce(sums, sum);
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (FITTED) scale[n] = storable(fitted_scale(scale[n], gain, sums[2 * n], sums[2 * n + 1]));
      if (broken[n]) scale[n] = as_float(0x7fc00000u);
      if (threadIdx.x % 32 == g)
        store_scale(rows[n] + Rows::PARAMS_OFFSET + heads[n] * Rows::PARAM_BYTES + g * Rows::GROUP_BYTES, scale[n]);
    }
  }
  packed.write(rows, heads, broken);
}

// Codes of oscar_kernels/codec.py, packed; ``rows`` are the tokens' rows, ``v`` is ``whole`` clipped.
template <bool FITTED, class Rows, int N>
DEVICE void quantize(const Vectors<Rows> (&v)[N], const Vectors<Rows> (&whole)[N], float gain, u8* const (&rows)[N],
                     const int (&heads)[N]) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES, GROUPS = Rows::GROUPS, GROUP = Rows::GROUP, BITS = Rows::BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  int lane = threadIdx.x % 32;
  bool broken[N];
  Packed<Rows, N> packed;
#pragma unroll
  for (int n = 0; n < N; n++) broken[n] = has_nan(whole[n]);
  packed.clear();
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // Group g has planes [first, last) whole, or one span of 32 bytes in one plane, or several.
    auto mine = [&](int i, int j) { return Rows::group(j, 32 * i) == g; };
    float extremes[2 * N];  // the largest, and the smallest negated
#pragma unroll
    for (int n = 0; n < N; n++) {
      float low = as_float(0x7f800000u), high = minus_infinity();
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (mine(i, j) && v[n].has_byte(i)) {
            low = fminf(low, v[n].y[i][j]);
            high = fmaxf(high, v[n].y[i][j]);
          }
      extremes[2 * n] = high;
      extremes[2 * n + 1] = -low;
    }
    reduce(extremes, [](float a, float b) { return fmaxf(a, b); });
    float scale[N], zero[N], middle[N], sums[4 * N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      float high = extremes[2 * n], low = -extremes[2 * n + 1];
      scale[n] = __fdiv_rn(fmaxf(high - low, 1e-8f), STEPS);
      if (SCALE_BYTES == 2 && !SCALE_BF16) {
        // Keeps zero = -low / scale within float16.
        float largest = fmaxf(fabsf(low), fabsf(high));
        scale[n] = fmaxf(scale[n], largest * (1.0f / 32768));
      }
      scale[n] = stored(storable(scale[n]));
      zero[n] = stored(__fdiv_rn(-low, scale[n]));
      // Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
      middle[n] = 0.5f * (low + high);
      float rest = 0, squares = 0, codes = 0, along = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (mine(i, j)) {
            float code = floorf(__fadd_rn(__fadd_rn(__fdiv_rn(v[n].y[i][j], scale[n]), zero[n]), 0.5f));
            code = fminf(fmaxf(code, 0.0f), STEPS);
            packed.add(n, i, j, code);
            if (FITTED && v[n].has_byte(i)) {
              float x = whole[n].y[i][j] - middle[n];
              rest += x;
              squares += x * x;
              codes += code;
              along += code * x;
            }
          }
      sums[4 * n] = rest;
      sums[4 * n + 1] = squares;
      sums[4 * n + 2] = codes;
      sums[4 * n + 3] = along;
    }
    if (FITTED) reduce(sums, [](float a, float b) { return a + b; });
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (FITTED) {
        float rest = sums[4 * n], squares = sums[4 * n + 1], codes = sums[4 * n + 2], along = sums[4 * n + 3];
        float mean = rest / GROUP, mean_code = codes / GROUP;
        along -= mean_code * rest;
        float fitted = along > 0 ? gain * (squares - mean * rest) / along : scale[n];
        scale[n] = stored(storable(fminf(fmaxf(fitted, scale[n] * (1 / STRETCH)), scale[n] * STRETCH)));
        zero[n] = stored(mean_code - (middle[n] + mean) / scale[n]);
      }
      if (broken[n]) scale[n] = zero[n] = as_float(0x7fc00000u);
      if (lane == g) {
        u8* at = rows[n] + Rows::PARAMS_OFFSET + heads[n] * Rows::PARAM_BYTES + g * 2 * SCALE_BYTES;
        if (SCALE_BYTES == 4) {
          ((float*)at)[0] = scale[n];
          ((float*)at)[1] = zero[n];
        } else {
          *(u32*)at = narrow_scale(scale[n]) | narrow_scale(zero[n]) << 16;
        }
      }
    }
  }
  packed.write(rows, heads, broken);
}
