// Vectors times the rotation of their head: which vectors a block has, and the products of its warps.
#pragma once

#include "config.cuh"

constexpr bool X_BF16 = Q_BF16;  // keys, values and queries have one format
constexpr int VECTORS = OSCAR_VECTORS;
static_assert(VECTORS == 16, "a block's vectors are the rows of a tensor-core product");
constexpr int STORE_WARPS = HEAD_DIM / 16;

// This warp's 16 columns of a rotation. Those of up to 128 channels fit registers.
template <int TERMS>
struct Columns {
  static constexpr bool KEPT = HEAD_DIM <= 128;
  static constexpr int COUNT = UNITS * 2;
  uint4 kept[KEPT && TERMS > 0 ? TERMS : 1][COUNT];
  const uint4* terms;

  DEVICE void load(int term, uint4 (&to)[COUNT]) const {
    const uint4* at = terms + ((term * STORE_WARPS + threadIdx.x / 32) * COUNT) * 32 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = at[i * 32];
  }
  DEVICE explicit Columns(const uint4* terms) : terms(terms) {
    if (KEPT && TERMS > 0) {
#pragma unroll
      for (int term = 0; term < TERMS; term++) load(term, kept[term]);
    }
  }

  // out[t] = products of rows l / 4 and l / 4 + 8 with columns 8 t + 2 (l % 4) and the next. Every term has a sum of its
  // own, so that products need not wait for each other; small terms are added first.
  DEVICE void multiply(float (&sum)[2][4], const uint4 (&first)[UNITS], const uint4 (&second)[UNITS]) {
#pragma unroll
    for (int term = TERMS - 1; term >= 0; term--) {
      uint4(&b)[COUNT] = kept[KEPT ? term : 0];
      if (!KEPT) load(term, b);
      float out[2][4] = {};
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        uint4 x = first[u], y = second[u], p = b[2 * u], q = b[2 * u + 1];
        mma_k16<X_BF16>(out[0], x.x, y.x, x.y, y.y, p.x, p.y);
        mma_k16<X_BF16>(out[1], x.x, y.x, x.y, y.y, p.z, p.w);
        mma_k16<X_BF16>(out[0], x.z, y.z, x.w, y.w, q.x, q.y);
        mma_k16<X_BF16>(out[1], x.z, y.z, x.w, y.w, q.z, q.w);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i / 4][i % 4] += out[i / 4][i % 4];
    }
  }
};

// Tiles of at most ``vectors`` vectors of heads that share a matrix.
DEVICE int tiles_of(int heads, int tokens, int vectors) { return (tokens * heads + vectors - 1) / vectors; }

// Blocks of ``span`` tiles each; none has tiles of two matrices.
template <int HEADS, int SETS>
DEVICE int blocks_of(int tokens, int vectors, int span) {
  return SETS * ((tiles_of(HEADS / SETS, tokens, vectors) + span - 1) / span);
}

// A vector of a tile; past the end the last one there is.
struct Vector {
  int token, head;
  bool live;
};

// Up to ``vectors`` vectors of one matrix.
template <int HEADS, int SETS>
struct Tile {
  int set, index, tokens, vectors;  // index: within those of its matrix

  DEVICE Vector at(int row) const {
    constexpr int OF_SET = HEADS / SETS;
    int vector = index * vectors + row, last = tokens * OF_SET - 1;
    bool live = row < vectors && vector <= last;
    vector = min(vector, last);
    return {vector / OF_SET, set * OF_SET + vector % OF_SET, live};
  }
};

// The tiles of a block. Matrices come one after the other, each with all its tiles.
template <int HEADS, int SETS>
struct Tiles {
  int set, begin, end, tokens, vectors;

  DEVICE Tiles(int block, int tokens, int vectors, int span) : tokens(tokens), vectors(vectors) {
    int tiles = tiles_of(HEADS / SETS, tokens, vectors), blocks = (tiles + span - 1) / span;
    set = SETS > 1 ? block / blocks : 0;
    begin = (block - set * blocks) * span;
    end = min(begin + span, tiles);
  }

  DEVICE Tile<HEADS, SETS> tile(int index) const { return {set, index, tokens, vectors}; }

  // The terms of their matrix.
  template <int TERMS, int MATRICES>
  DEVICE const uint4* terms_of(const uint4* terms) const {
    return terms + (MATRICES == 1 ? 0 : set) * (TERMS * HEAD_DIM * HEAD_DIM / 8);
  }
};

// Channels 32 u + 8 (l % 4) + 0..7 of a vector.
template <class Input>
DEVICE void load_vector(uint4 (&x)[UNITS], const Input& input, int token, int head) {
  const u16* at = input.x + token * input.token_stride + head * input.head_stride + 8 * (threadIdx.x % 4);
#pragma unroll
  for (int u = 0; u < UNITS; u++) x[u] = *(const uint4*)(at + 32 * u);
}

// Rows lane / 4 of a tile and 8 further.
template <class Input, int HEADS, int SETS>
DEVICE void load_vectors(uint4 (&x)[2][UNITS], const Input& input, Tile<HEADS, SETS> tile) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    Vector of = tile.at(threadIdx.x % 32 / 4 + 8 * i);
    load_vector(x[i], input, of.token, of.head);
  }
}
