// Scales and zero points as rows hold them.
#pragma once

#include "config.cuh"

constexpr float STRETCH = OSCAR_STRETCH_64THS / 64.0f;  // of codec.py

DEVICE u32 narrow_scale(float x) { return SCALE_BF16 ? pack_bfloat(x, 0) & 0xffffu : pack_half(x, 0) & 0xffffu; }
// Rounds to the stored format and back.
DEVICE float stored(float x) {
  return SCALE_BYTES == 4 ? x : SCALE_BF16 ? low_half<true>(narrow_scale(x)) : low_half<false>(narrow_scale(x));
}

// Keeps what becomes a scale within float16, and normal, where that is what scales are stored in.
DEVICE float storable(float scale) {
  return SCALE_BYTES == 2 && !SCALE_BF16 ? fminf(fmaxf(scale, 0.00006103515625f), 65504.0f) : scale;
}
