// One vector, by one warp: clip, quantize and pack. The numbers are those of oscar_kernels/codec.py.
#pragma once

#include "config.cuh"

constexpr float STRETCH = OSCAR_STRETCH_64THS / 64.0f;  // of codec.py

// Lane l has bytes l, l + 32, ... of the packed codes, of three bits of the low ones: Rows::channel(plane, byte).
template <class Rows>
struct Vectors {
  static constexpr int BYTES = (Rows::WIDTH + 31) / 32, PLANES = Rows::PLANES;
  float y[BYTES][PLANES];

  DEVICE static bool has_byte(int i) { return Rows::WIDTH % 32 == 0 || threadIdx.x % 32 + 32 * i < Rows::WIDTH; }
};

// Clamps to the rank-th largest magnitude, duplicates counted.
template <class Rows>
DEVICE void clip(Vectors<Rows>& v, int rank) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES;
  if (rank == 0) return;
  u32 bits[BYTES][PLANES];  // of magnitudes, which order as integers do
#pragma unroll
  for (int i = 0; i < BYTES; i++)
#pragma unroll
    for (int j = 0; j < PLANES; j++) bits[i][j] = v.has_byte(i) ? __float_as_uint(fabsf(v.y[i][j])) : 0;
  u32 threshold = 0;
  if (rank <= 16) {
    // Take the largest away, rank - 1 times.
#pragma unroll 1
    for (int round = 0; round < rank; round++) {
      u32 mine = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++) mine = max(mine, bits[i][j]);
      threshold = __reduce_max_sync(FULL_WARP, mine);
      bool taken = threadIdx.x % 32 != __ffs(__ballot_sync(FULL_WARP, mine == threshold)) - 1;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (!taken && bits[i][j] == threshold) {
            bits[i][j] = 0;
            taken = true;
          }
    }
  } else {
    for (u32 bit = 1u << 30; bit > 0; bit >>= 1) {
      u32 trial = threshold | bit;
      int above = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++) above += __popc(__ballot_sync(FULL_WARP, v.has_byte(i) && bits[i][j] >= trial));
      if (above >= rank) threshold = trial;
    }
  }
  float tau = __uint_as_float(threshold);
#pragma unroll
  for (int i = 0; i < BYTES; i++)
#pragma unroll
    for (int j = 0; j < PLANES; j++) v.y[i][j] = fminf(fmaxf(v.y[i][j], -tau), tau);
}

DEVICE u32 narrow_scale(float x) { return SCALE_BF16 ? pack_bfloat(x, 0) & 0xffffu : pack_half(x, 0) & 0xffffu; }
// Rounds to the stored format and back.
DEVICE float stored(float x) {
  return SCALE_BYTES == 4 ? x : SCALE_BF16 ? low_half<true>(narrow_scale(x)) : low_half<false>(narrow_scale(x));
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

// Codes of oscar_kernels/codec.py, packed; ``row`` is the token's row, ``v`` is ``whole`` clipped.
template <bool FITTED, class Rows>
DEVICE void quantize(const Vectors<Rows>& v, const Vectors<Rows>& whole, float gain, u8* row, int head) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES, GROUPS = Rows::GROUPS, GROUP = Rows::GROUP, BITS = Rows::BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  int lane = threadIdx.x % 32;
  bool broken = has_nan(whole);
  u32 packed[BYTES], high_bits[BYTES];  // of three bits the low two, and the others where they lie in the first half
#pragma unroll
  for (int i = 0; i < BYTES; i++) packed[i] = high_bits[i] = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // Group g has planes [first, last) whole, or one span of 32 bytes in one plane, or several.
    auto mine = [&](int i, int j) { return Rows::group(j, 32 * i) == g; };
    float low = as_float(0x7f800000u), high = minus_infinity();
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++)
        if (mine(i, j) && v.has_byte(i)) {
          low = fminf(low, v.y[i][j]);
          high = fmaxf(high, v.y[i][j]);
        }
    for (int step = 1; step < 32; step *= 2) {
      low = fminf(low, __shfl_xor_sync(FULL_WARP, low, step));
      high = fmaxf(high, __shfl_xor_sync(FULL_WARP, high, step));
    }
    float scale = __fdiv_rn(fmaxf(high - low, 1e-8f), STEPS);
    if (SCALE_BYTES == 2 && !SCALE_BF16) {
      // Keeps the scale and zero = -low / scale within float16, and the scale normal.
      float largest = fmaxf(fabsf(low), fabsf(high));
      scale = fminf(fmaxf(fmaxf(scale, largest * (1.0f / 32768)), 0.00006103515625f), 65504.0f);
    }
    scale = stored(scale);
    float zero = stored(__fdiv_rn(-low, scale));
    // Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
    float middle = 0.5f * (low + high), rest = 0, squares = 0, codes = 0, along = 0;
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++)
        if (mine(i, j)) {
          float code = floorf(__fadd_rn(__fadd_rn(__fdiv_rn(v.y[i][j], scale), zero), 0.5f));
          code = fminf(fmaxf(code, 0.0f), STEPS);
          if (BITS == 3) {
            packed[i] |= ((u32)code & 3) << (2 * j);
            high_bits[i] |= ((u32)code >> 2) << (2 * j + 2) % 8;
          } else {
            packed[i] |= (u32)code << (BITS * j);
          }
          if (FITTED && v.has_byte(i)) {
            float x = whole.y[i][j] - middle;
            rest += x;
            squares += x * x;
            codes += code;
            along += code * x;
          }
        }
    if (FITTED) {
      for (int step = 1; step < 32; step *= 2) {
        rest += __shfl_xor_sync(FULL_WARP, rest, step);
        squares += __shfl_xor_sync(FULL_WARP, squares, step);
        codes += __shfl_xor_sync(FULL_WARP, codes, step);
        along += __shfl_xor_sync(FULL_WARP, along, step);
      }
      float mean = rest / GROUP, mean_code = codes / GROUP;
      along -= mean_code * rest;
      float fitted = along > 0 ? gain * (squares - mean * rest) / along : scale;
      fitted = fminf(fmaxf(fitted, scale * (1 / STRETCH)), scale * STRETCH);
      if (SCALE_BYTES == 2 && !SCALE_BF16) fitted = fminf(fmaxf(fitted, 0.00006103515625f), 65504.0f);
      scale = stored(fitted);
      zero = stored(mean_code - (middle + mean) / scale);
    }
    if (broken) scale = zero = as_float(0x7fc00000u);
    if (lane == g) {
      u8* at = row + Rows::PARAMS_OFFSET + head * Rows::PARAM_BYTES + g * 2 * SCALE_BYTES;
      if (SCALE_BYTES == 4) {
        ((float*)at)[0] = scale;
        ((float*)at)[1] = zero;
      } else {
        *(u32*)at = narrow_scale(scale) | narrow_scale(zero) << 16;
      }
    }
  }
  u8* to = row + head * Rows::CODE_BYTES;
#pragma unroll
  for (int i = 0; i < BYTES; i++) {
    int b = lane + 32 * i;
    if (v.has_byte(i)) to[b] = broken ? 0 : packed[i];
    if (BITS == 3) {
      // A byte of high bits is of two bytes four apart, the second one bit further up.
      u32 both = high_bits[i] | __shfl_xor_sync(FULL_WARP, high_bits[i], 4) << 1;
      if (v.has_byte(i) && lane / 4 % 2 == 0) to[Rows::WIDTH + b / 8 * 4 + b % 4] = broken ? 0 : both;
    }
  }
}
