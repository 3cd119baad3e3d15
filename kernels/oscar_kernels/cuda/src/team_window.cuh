// Attention of four warps to eight tokens of a 16-bit window. Logits are divided among them by columns, outputs by channels.
#pragma once

#include "team_values.cuh"
#include "window.cuh"

constexpr int LOGIT_BYTES = WINDOW_TILE * PRODUCT_COLUMNS * 4;  // where weights of history were, of a tile and the next

struct TeamWindow {
  uint4 queries[UNITS];  // of this warp's eight columns, see QueryFloats
  float unit;

  DEVICE void load(u32 q, float sm_scale, const Team& team) {
    int column = 8 * team.warp + team.lane / 4;
    unit = sm_scale * LOG2_E;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
      queries[u] = column < COLUMNS ? load_shared4(q + column * HEAD_DIM * 2 + 2 * (32 * u + 8 * (team.lane % 4)))
                                    : make_uint4(0, 0, 0, 0);
  }

  // ``keys``: of this kv head, of the tile's first token; ``at``: where all warps' logits go.
  DEVICE void multiply(u32 keys, u32 at, const Team& team) const {
    int row = team.lane / 4, c = team.lane % 4;
    float product[4] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      uint4 k = load_shared4(keys + row_of_token(row) * WINDOW_ROW + 64 * u + 16 * c);
      mma_k16<WINDOW_BF16>(product, k.x, 0, k.y, 0, queries[u].x, queries[u].y);
      mma_k16<WINDOW_BF16>(product, k.z, 0, k.w, 0, queries[u].z, queries[u].w);
    }
    store_shared2(at + (row * PRODUCT_COLUMNS + 8 * team.warp + 2 * c) * 4, __float_as_uint(product[0] * unit),
                  __float_as_uint(product[1] * unit));
  }

  // See attend_window(); ``buffer``: 0 and 1 in turn.
  DEVICE void attend(TeamState& state, u32 keys, u32 values, int count, const Fresh& fresh, int buffer, const Team& team) const {
    u32 at = team.weights + buffer * LOGIT_BYTES;
    multiply(keys, at, team);
    team.meet();
    int row = team.lane / 4, c = team.lane % 4;
    bool any_fresh = fresh.begin < WINDOW_TILE, raised = false;
    u32 broken = any_fresh ? broken_tokens(values) : 0;
    float x[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      x[k] = row < count ? as_float(load_shared(at + (row * PRODUCT_COLUMNS + column_of(k)) * 4)) : minus_infinity();
      if (any_fresh && row < count && column_of(k) < COLUMNS) {
        if (fresh.hides(row, column_of(k))) x[k] = minus_infinity();
        else if (broken >> row & 1) x[k] = as_float(0x7fc00000u);
      }
      raised |= x[k] > state.top[k] + SLACK;
    }
    if (__any_sync(FULL_WARP, raised)) {  // so do the other warps, who have the same
      float fade[OWN];
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        float peak = x[k];
        for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, step));
        peak = fmaxf(peak, state.top[k]);
        fade[k] = exp2_fast(state.top[k] - peak);
        state.top[k] = peak;
      }
      state.scale(fade, 1);
    }
    u32 weights[OWN / 2];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      x[k] = exp2_fast(x[k] - state.top[k]);
      if (team.warp == 0) state.total[k] += x[k];
    }
#pragma unroll
    for (int j = 0; j < OWN / 2; j++) weights[j] = transpose_8x8(pack_halves<WINDOW_BF16>(x[2 * j], x[2 * j + 1]));
    // A token that is not there has weight 0, but its bits may be a NaN.
    u32 absent = broken >> 2 * c;
    u32 keep = (2 * c < count && !(absent & 1) ? 0x0000ffffu : 0) | (2 * c + 1 < count && !(absent & 2) ? 0xffff0000u : 0);
    u32 even = values + row_of_token(2 * c) * WINDOW_ROW, odd = values + row_of_token(2 * c + 1) * WINDOW_ROW;
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
      int channel = ValueRows::channel(plane, 16 * team.warp + 2 * row);
      u32 first = load_shared(even + 2 * channel), second = load_shared(odd + 2 * channel);
      u32 a0 = __byte_perm(first, second, 0x5410) & keep, a1 = __byte_perm(first, second, 0x7632) & keep;
#pragma unroll
      for (int j = 0; j < OWN / 2; j++) {
        float* sums = state.sums[plane] + 4 * j;
        float four[4] = {sums[0], sums[1], sums[2], sums[3]};
        mma_k8<WINDOW_BF16>(four, a0, a1, weights[j]);
        for (int i = 0; i < 4; i++) sums[i] = four[i];
      }
    }
  }
};
