// A tile of 32 rows of history in shared memory: which row a lane reads where.
#pragma once

#include "softmax.cuh"

constexpr int TOKENS = TILE / 8;  // tokens of a tile that a lane stands for: token_of_row(l / 4) + 8 i

// Which token of a set of eight a row of a product is: chosen so that the rows that are loaded at the same time, in pairs
// of lanes for keys and for values, lie in different banks where a row is 8 words longer than a multiple of 32; where one
// without zero points is 4 words longer, those of values do in order.
DEVICE int token_of_row(int row) {
  if (!ValueRows::HAS_ZERO && ValueRows::ROW_BYTES % 128 == 16) return row;
  return row % 2 == 0 ? row / 2 : (row / 2 ^ 2) + 4;
}

struct Param {
  float scale, zero;
};

template <class Rows>
DEVICE void load_params(Param (&params)[Rows::GROUPS], u32 address) {
#pragma unroll
  for (int g = 0; g < Rows::GROUPS; g++) {
    if (!Rows::HAS_ZERO) {
      float scale = SCALE_BYTES == 4 ? as_float(load_shared(address + 4 * g))
                                     : low_half<SCALE_BF16>(load_shared_u16(address + 2 * g));
      params[g] = {scale, Rows::ZERO};
    } else if (SCALE_BYTES == 4) {
      params[g] = {as_float(load_shared(address + 8 * g)), as_float(load_shared(address + 8 * g + 4))};
    } else {
      u32 word = load_shared(address + 4 * g);
      params[g] = {low_half<SCALE_BF16>(word), high_half<SCALE_BF16>(word)};
    }
  }
}

// A word of a row. Rows without zero points of an odd number of scales are not of whole words.
template <class Rows>
DEVICE u32 load_word(u32 address) {
  if (Rows::ROW_BYTES % 4 == 0) return load_shared(address);
  return load_shared_u16(address) | load_shared_u16(address + 2) << 16;
}

// Four bytes of codes of one plane, and nothing else in them, ``rows::weight(plane)`` times the codes.
//
// Of three bits ``high`` are the bytes of high bits that belong to the bytes ``low``, moved down by one for every second
// four bytes: they lie where they continue the low bits, those of the last plane where they do so once both have been moved.
template <class Rows>
DEVICE u32 plane_codes(u32 low, u32 high, int plane) {
  if (Rows::BITS != 3) return low & (0x01010101u * ((1 << Rows::BITS) - 1) << (Rows::BITS * plane));
  if (plane < 3) return (low & 0x03030303u << (2 * plane)) | (high & 0x04040404u << (2 * plane));
  return (low >> 2 & 0x30303030u) | (high << 6 & 0x40404040u);
}

// Where this lane reads in a tile; byte offsets of this warp's kv head.
struct Lane {
  int key, key_params, value_even, value_odd, value_params;
  int key_high, value_high;        // from the bytes of low bits of three to those of their high bits
  int key_shift, value_shift;      // what the latter are moved down by
  u32 book;                        // this lane's points, where keys have a codebook

  DEVICE explicit Lane(int head) {
    int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4, token = token_of_row(row);
    int codes = head * KeyRows::CODE_BYTES, at = (KeyRows::NARROW || HAS_BOOK ? 4 : 8) * c;
    key = token * KeyRows::ROW_BYTES + codes + at;
    key_high = KeyRows::WIDTH + at / 8 * 4 - at;
    key_shift = at / 4 % 2;
    key_params = token * KeyRows::ROW_BYTES + KeyRows::PARAMS_OFFSET + head * KeyRows::PARAM_BYTES;
    at = (ValueRows::NARROW ? 2 : 4) * row;
    int value = head * ValueRows::CODE_BYTES + at;
    value_even = token_of_row(2 * c) * ValueRows::ROW_BYTES + value;
    value_odd = token_of_row(2 * c + 1) * ValueRows::ROW_BYTES + value;
    value_high = ValueRows::WIDTH + at / 8 * 4 + at % 4 - at;
    value_shift = at / 4 % 2;
    value_params = token * ValueRows::ROW_BYTES + ValueRows::PARAMS_OFFSET + head * ValueRows::PARAM_BYTES;
  }
};
