// Attention of one warp to eight tokens of a 16-bit window: sinks or recent tokens, as they are in shared memory.
//
// The columns of products are those of history.cuh; where that has high and low bytes, queries here (if they are finer
// than the window's format) and weights have a 16-bit value and its rounding error.
#pragma once

#include "softmax.cuh"

struct QueryFloats {
  uint4 columns[WIDE ? 1 : QK_BLOCKS * UNITS];
  u32 queries;  // in shared memory, heads side by side; WIDE columns are made of them anew for every product
  float unit;

  DEVICE void load(u32 q, float sm_scale);
  // This lane's words of the columns of products 2 u and 2 u + 1.
  DEVICE uint4 column(int block, int u) const { return WIDE ? make(block, u) : columns[block * UNITS + u]; }
  DEVICE uint4 make(int block, int u) const;
};

// Rounding to the window's format, and what that loses.
DEVICE void split(float x, float& high, float& low) {
  high = low_half<WINDOW_BF16>(pack_halves<WINDOW_BF16>(x, 0));
  low = x - high;
}

// Product 2 u + i is over channels 32 u + 8 c + 4 i + {0, 1} and, eight rows further, {2, 3}: c = l % 4.
DEVICE uint4 QueryFloats::make(int block, int u) const {
  int lane = threadIdx.x % 32, column = lane / 4, c = lane % 4, head = 4 * block + column / 2;
  uint4 eight = make_uint4(0, 0, 0, 0);
  // What lies in the window's format has no rounding error: the odd columns are zero.
  bool zero = head >= COLUMNS || (Q_BF16 == WINDOW_BF16 && column % 2);
  if (!zero) eight = load_shared4(queries + head * HEAD_DIM * 2 + 2 * (32 * u + 8 * c));
  if (Q_BF16 == WINDOW_BF16) return eight;
  auto part = [&](u32 pair) {
    float high[2], low[2];
    split(low_half<Q_BF16>(pair), high[0], low[0]);
    split(high_half<Q_BF16>(pair), high[1], low[1]);
    return column % 2 ? pack_halves<WINDOW_BF16>(low[0], low[1]) : pack_halves<WINDOW_BF16>(high[0], high[1]);
  };
  return make_uint4(part(eight.x), part(eight.y), part(eight.z), part(eight.w));
}

DEVICE void QueryFloats::load(u32 q, float sm_scale) {
  queries = q;
  unit = sm_scale * LOG2_E;
  if (WIDE) return;
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++)
#pragma unroll
    for (int u = 0; u < UNITS; u++) columns[b * UNITS + u] = make(b, u);
}

// A stage may hold fewer tokens than a tile has rows.
DEVICE int row_of_token(int token) { return WINDOW_TOKENS < WINDOW_TILE ? min(token, WINDOW_TOKENS - 1) : token; }

// New tokens among those of a tile, in verification: row ``begin`` of the tile is the first of them, and ``visible`` is where
// shared memory says which of them each query token sees.
struct Fresh {
  int begin;
  u32 visible;

  // Whether a column may not see the token in a row.
  DEVICE bool hides(int row, int column) const {
    int token = column / GQA, index = row - begin;
    uint2 word = load_shared2(visible + 8 * token);
    return index >= 0 && !((index < 32 ? word.x >> index : word.y >> (index - 32)) & 1);
  }
};

// Whether one of two numbers in the window's format is a NaN or infinite.
DEVICE bool not_finite(u32 pair) {
  constexpr u32 EXPONENT = WINDOW_BF16 ? 0x7f80 : 0x7c00;
  return (pair & EXPONENT) == EXPONENT || (pair & EXPONENT << 16) == EXPONENT << 16;
}

// Bit t: the values of the tile's token t are not all finite. By the whole warp.
DEVICE u32 broken_tokens(u32 values) {
  int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
  bool mine = false;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    uint4 v = load_shared4(values + row_of_token(row) * WINDOW_ROW + 64 * u + 16 * c);
    mine |= not_finite(v.x) || not_finite(v.y) || not_finite(v.z) || not_finite(v.w);
  }
  u32 votes = __ballot_sync(FULL_WARP, mine), tokens = 0;
  for (int t = 0; t < WINDOW_TILE; t++) tokens |= (votes >> 4 * t & 15) != 0 ? 1u << t : 0;
  return tokens;
}

// ``keys`` and ``values``: this warp's kv head of the tile's first token. Tokens from ``count`` on may hold anything.
DEVICE void attend_window(
    Softmax& softmax, Output& output, const QueryFloats& q, u32 keys, u32 values, int count, const Fresh& fresh) {
  int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
  float product[QK_BLOCKS][4];
  for (auto& block : product)
    for (float& x : block) x = 0;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    uint4 k = load_shared4(keys + row_of_token(row) * WINDOW_ROW + 64 * u + 16 * c);
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
      uint4 column = q.column(b, u);
      mma_k16<WINDOW_BF16>(product[b], k.x, 0, k.y, 0, column.x, column.y);
      mma_k16<WINDOW_BF16>(product[b], k.z, 0, k.w, 0, column.z, column.w);
    }
  }
  // A value that is no number would spoil the columns that do not see it, too: 0 x NaN is NaN. It is left out of the
  // product, and who sees it is told by the logit.
  bool any_fresh = DRAFTS > 0 && fresh.begin < WINDOW_TILE;
  u32 broken = any_fresh ? broken_tokens(values) : 0;
  float logits[QK_BLOCKS];
  bool raised = false;
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    logits[b] = row < count ? (product[b][0] + product[b][1]) * q.unit : minus_infinity();
    if (any_fresh && row < count) {
      if (fresh.hides(row, 4 * b + (int)threadIdx.x % 4)) logits[b] = minus_infinity();
      else if (broken >> row & 1) logits[b] = as_float(0x7fc00000u);
    }
    raised |= logits[b] > softmax.top[b] + SLACK;
  }
  if (__any_sync(FULL_WARP, raised)) output.scale(softmax.raise(logits), 1);
  float weights[QK_BLOCKS];
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    weights[b] = exp2_fast(logits[b] - softmax.top[b]);
    softmax.total[b] += weights[b];
  }
  u32 columns[PV_BLOCKS];
#pragma unroll
  for (int n = 0; n < PV_BLOCKS; n++) {
    if (PAIRED) {
      float high, low;
      split(weights[0], high, low);
      columns[n] = transpose_8x8(pack_halves<WINDOW_BF16>(high, low));
    } else {
      columns[n] = transpose_8x8(pack_halves<WINDOW_BF16>(weights[left_block(n)], weights[right_block(n)]));
    }
  }
  // A token that is not there has weight 0, but its bits may be a NaN.
  u32 absent = broken >> 2 * c;
  u32 keep = (2 * c < count && !(absent & 1) ? 0x0000ffffu : 0) | (2 * c + 1 < count && !(absent & 2) ? 0xffff0000u : 0);
  u32 even = values + row_of_token(2 * c) * WINDOW_ROW, odd = values + row_of_token(2 * c + 1) * WINDOW_ROW;
  auto multiply = [&](int tile, u32 x, u32 y) {  // two channels of two tokens
    u32 first = __byte_perm(x, y, 0x5410) & keep, second = __byte_perm(x, y, 0x7632) & keep;
#pragma unroll
    for (int n = 0; n < PV_BLOCKS; n++) mma_k8<WINDOW_BF16>(output.acc[n][tile], first, second, columns[n]);
  };
#pragma unroll
  for (int plane = 0; plane < ValueRows::PLANES; plane++) {
    if (ValueRows::NARROW) {
      int at = 2 * ValueRows::channel(plane, 2 * row);
      multiply(plane, load_shared(even + at), load_shared(odd + at));
    } else {
#pragma unroll
      for (int span = 0; span < ValueRows::SPANS; span++) {
        int at = 2 * ValueRows::channel(plane, 32 * span + 4 * row);
        uint2 x = load_shared2(even + at), y = load_shared2(odd + at);
        multiply(2 * ValueRows::PLANES * span + plane, x.x, y.x);
        multiply(2 * ValueRows::PLANES * span + ValueRows::PLANES + plane, x.y, y.y);
      }
    }
  }
}
