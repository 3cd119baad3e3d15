// The running state of one warp's attention: one kv head, its query heads, some of the tokens.
//
// Lanes: lane l stands for token rows l / 4 (and that plus 8, ...) and, of each block of four query heads, for head l % 4.
// Sums over tokens stay spread over the lanes of a head until the end.
#pragma once

#include "config.cuh"

constexpr float SLACK = 3.0f;     // by how much (log2) a window's logit may exceed the running maximum
constexpr float LOWEST = -1e30f;  // running maximum of nothing

struct State {
  float acc[PV_BLOCKS][TILES_M][4];  // unnormalized output
  float top[QK_BLOCKS];              // running maximum of log2 weights
  float total[QK_BLOCKS];            // sum of weights, this lane's tokens only
  float shift[QK_BLOCKS][GROUPS];    // sum of weight * scale * zero point, this lane's tokens only
  float factor;                      // acc holds weights times this, about the inverse of the largest value scale

  DEVICE void clear(float first_factor) {
    for (auto& block : acc)
      for (auto& tile : block)
        for (float& x : tile) x = 0;
    for (int b = 0; b < QK_BLOCKS; b++) {
      top[b] = LOWEST;
      total[b] = 0;
      for (float& x : shift[b]) x = 0;
    }
    factor = first_factor;
  }

  // New maxima of this lane's heads over the warp, given this lane's; everything so far is scaled to them.
  DEVICE void raise(const float (&lane_top)[QK_BLOCKS], float new_factor) {
    float fade[QK_BLOCKS];
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      float peak = lane_top[b];
      for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, step));
      peak = fmaxf(peak, top[b]);
      fade[b] = exp2_fast(top[b] - peak);
      top[b] = peak;
      total[b] *= fade[b];
      for (float& x : shift[b]) x *= fade[b];
    }
    float ratio = new_factor / factor;
    factor = new_factor;
#pragma unroll
    for (int n = 0; n < PV_BLOCKS; n++)
#pragma unroll
      for (int i = 0; i < TILES_M; i++) {
        acc[n][i][0] *= ratio * fade[left(n)];
        acc[n][i][1] *= ratio * fade[right(n)];
        acc[n][i][2] *= ratio * fade[left(n)];
        acc[n][i][3] *= ratio * fade[right(n)];
      }
  }

  // Blocks of heads that the even and odd columns of output block n belong to.
  DEVICE static constexpr int left(int n) { return PAIRED ? 0 : 2 * n; }
  DEVICE static constexpr int right(int n) { return PAIRED ? 0 : (2 * n + 1 < QK_BLOCKS ? 2 * n + 1 : 2 * n); }
};

// Query heads 4 b + l % 4 that exist.
DEVICE bool head_exists(int block) { return 4 * block + (int)threadIdx.x % 4 < GQA; }
