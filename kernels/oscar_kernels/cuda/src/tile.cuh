// A tile of 32 rows of history in shared memory: which row a lane reads where.
#pragma once

#include "softmax.cuh"

constexpr int TOKENS = TILE / 8;  // tokens of a tile that a lane stands for: token_of_row(l / 4) + 8 i

// Which token of a set of eight a row of a product is: chosen so that the rows that are loaded at the same time, in pairs
// of lanes for keys and for values, lie in different banks where a row is 8 words longer than a multiple of 32.
DEVICE int token_of_row(int row) { return row % 2 == 0 ? row / 2 : (row / 2 ^ 2) + 4; }

struct Param {
  float scale, zero;
};

DEVICE void load_params(Param (&params)[GROUPS], u32 address) {
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    if (SCALE_BYTES == 4) {
      params[g] = {as_float(load_shared(address + 8 * g)), as_float(load_shared(address + 8 * g + 4))};
    } else {
      u32 word = load_shared(address + 4 * g);
      params[g] = {low_half<SCALE_BF16>(word), high_half<SCALE_BF16>(word)};
    }
  }
}

// Where this lane reads in a tile; byte offsets of this warp's kv head.
struct Lane {
  int key, value_even, value_odd, params;

  DEVICE explicit Lane(int head) {
    int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
    int codes = head * CODE_BYTES;
    key = token_of_row(row) * ROW_BYTES + codes + (HEAD_DIM == 64 ? 4 : 8) * c;
    int value = codes + (HEAD_DIM == 64 ? 2 : 4) * row;
    value_even = token_of_row(2 * c) * ROW_BYTES + value;
    value_odd = token_of_row(2 * c + 1) * ROW_BYTES + value;
    params = token_of_row(row) * ROW_BYTES + PARAMS_OFFSET + head * PARAM_BYTES;
  }
};

