// The running state of one warp's attention: one kv head, its query heads, some of the tokens.
//
// Lanes: lane l stands for token rows l / 4 (and that plus 8, ...) and, of each block of four query heads, for head l % 4.
// Sums over tokens stay spread over the lanes of a head until the end.
#pragma once

#include "config.cuh"

constexpr float SLACK = 3.0f;     // by how much (log2) a window's logit may exceed the running maximum
constexpr float LOWEST = -1e30f;  // running maximum of nothing

struct Softmax {
  float top[QK_BLOCKS];            // running maximum of log2 weights
  float total[QK_BLOCKS];          // sum of weights, this lane's tokens only
  float shift[QK_BLOCKS][V_GROUPS];  // sum of weight * value scale * zero point, this lane's tokens only

  DEVICE void clear() {
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      top[b] = LOWEST;
      total[b] = 0;
      for (float& x : shift[b]) x = 0;
    }
  }

  // Halves every weight so far and to come.
  DEVICE void halve() {
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      top[b] += 1;
      total[b] *= 0.5f;
      for (float& x : shift[b]) x *= 0.5f;
    }
  }

  // New maxima of this lane's heads over the warp, given this lane's. Returns what everything so far is scaled by.
  struct Fade {
    float of[QK_BLOCKS];
  };
  DEVICE Fade raise(const float (&lane_top)[QK_BLOCKS]) {
    Fade fade;
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      float peak = lane_top[b];
      for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, step));
      peak = fmaxf(peak, top[b]);
      fade.of[b] = exp2_fast(top[b] - peak);
      top[b] = peak;
      total[b] *= fade.of[b];
      for (float& x : shift[b]) x *= fade.of[b];
    }
    return fade;
  }
};

// Blocks of heads that the even and odd columns of output block n belong to.
DEVICE constexpr int left_block(int n) { return PAIRED ? 0 : 2 * n; }
DEVICE constexpr int right_block(int n) { return PAIRED ? 0 : (2 * n + 1 < QK_BLOCKS ? 2 * n + 1 : 2 * n); }

// Unnormalized outputs. Tile i holds, in rows l / 4 and l / 4 + 8, channels output_channel(...) of partial.cuh; of PAIRED
// columns the sum counts.
struct Output {
  float acc[PV_BLOCKS][TILES_M][4];

  DEVICE void clear() {
    for (auto& block : acc)
      for (auto& tile : block)
        for (float& x : tile) x = 0;
  }

  DEVICE void scale(const Softmax::Fade& fade, float factor) {
#pragma unroll
    for (int n = 0; n < PV_BLOCKS; n++)
#pragma unroll
      for (auto& tile : acc[n])
#pragma unroll
        for (int i = 0; i < 4; i++) tile[i] *= factor * fade.of[i % 2 ? right_block(n) : left_block(n)];
  }
};

// Query heads 4 b + l % 4 that exist.
DEVICE bool head_exists(int block) { return 4 * block + (int)threadIdx.x % 4 < COLUMNS; }
