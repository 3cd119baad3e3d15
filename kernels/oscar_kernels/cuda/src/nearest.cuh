// Keys as indexes of the nearest points of a codebook, see codebook.py, where kv heads and groups have points of their own: a
// tile of 16 vectors of one kv head, by all warps of the block.
//
// The point p nearest to x has the largest x.p - |p|^2 / 2. For four channels and eight points that is one tensor-core product
// of 16 vectors: lanes 0 to 2 of a row have the 16-bit terms that a float32 number is made of, times the same whole numbers,
// and lane 3 has -1 times the terms of |p|^2 / 2, which are exact. A warp has four groups of four channels.
#pragma once

#include "quantize.cuh"
#include "rotation.cuh"

constexpr int BOOK_GROUPS = HEAD_DIM / 4;
constexpr int GROUPS_OF_WARP = BOOK_GROUPS / STORE_WARPS;
constexpr int Y_STRIDE = HEAD_DIM + 4;
// Shared memory behind tiles: a scale of every vector, and its indexes.
constexpr int INDEX_FLOATS = HAS_BOOK && !SHARED_BOOK ? VECTORS + VECTORS * BOOK_GROUPS / 4 : 0;

struct Points {
  // [kv_heads, groups, 256][2]: four bfloat16 numbers of a point, three of half its square, see books.py. Of a shared book
  // see nearest_shared.cuh.
  const uint2* terms;
  const float* factor;  // [kv_heads, groups]

  DEVICE const uint2* of(int head, int group, int point) const {
    return terms + ((head * BOOK_GROUPS + group) * 256 + point) * 2;
  }
};

// Term ``index`` of three bfloat16 ones that are x.
DEVICE float term_of(float x, int index) {
  float first = low_half<true>(pack_bfloat(x, 0));
  float second = low_half<true>(pack_bfloat(x - first, 0));
  return index == 0 ? first : index == 1 ? second : x - first - second;
}

// The search of a warp through the points of its groups, set after set. A set is asked for while the one before is compared,
// the first one before the vectors are there: points come from the L2 cache or from memory.
struct Search {
  static constexpr int PRODUCTS = 16;  // of eight points, of a set
  static constexpr int SETS = GROUPS_OF_WARP * 256 / (8 * PRODUCTS);
  static_assert(256 == 2 * 8 * PRODUCTS, "two sets take turns in registers");
  const uint2* lane_terms;  // of this lane, of the warp's first point
  uint2 even[PRODUCTS], odd[PRODUCTS];

  DEVICE Search(const Points& points, int head) {
    int lane = threadIdx.x % 32;
    lane_terms = points.of(head, GROUPS_OF_WARP * (threadIdx.x / 32), lane / 4) + (lane % 4 == 3);
    ask(even, 0);
  }

  DEVICE void ask(uint2 (&set)[PRODUCTS], int number) const {
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++)
      set[i] = lane_terms[(number * PRODUCTS + i) * 8 * 2];
  }

  // What has scored best for this lane's two rows.
  struct Best {
    float score[2] = {minus_infinity(), minus_infinity()};
    int point[2] = {0, 0};

    DEVICE void compare(const u32 (&a)[4], const uint2 (&set)[PRODUCTS], int first) {
#pragma unroll
      for (int k = 0; k < PRODUCTS; k++) {
        float of[4] = {};
        mma_k16<true>(of, a[0], a[1], a[2], a[3], set[k].x, set[k].y);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (of[i] > score[i / 2]) score[i / 2] = of[i], point[i / 2] = first + 8 * k + 2 * (threadIdx.x % 4) + i % 2;
      }
    }
  };

  // Indexes of the points nearest to the tile's vectors over their scales, to ``indexes`` [VECTORS, BOOK_GROUPS].
  DEVICE void find(const Points& points, int head, const float* tile_y, const float* scales, u8* indexes) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
#pragma unroll 1
    for (int own = 0; own < GROUPS_OF_WARP; own++) {
      ask(odd, 2 * own + 1);
      int group = GROUPS_OF_WARP * warp + own;
      float factor = points.factor[head * BOOK_GROUPS + group];
      u32 a[4];  // of both rows channels 0 and 1, then 2 and 3
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float4 y = *(const float4*)(tile_y + (row + 8 * i) * Y_STRIDE + 4 * group);
        float unit = 1.0f / (scales[row + 8 * i] * factor);
        a[i] = c == 3 ? pack_bfloat(-1, -1) : pack_bfloat(term_of(y.x * unit, c), term_of(y.y * unit, c));
        a[2 + i] = c == 3 ? pack_bfloat(-1, 0) : pack_bfloat(term_of(y.z * unit, c), term_of(y.w * unit, c));
      }
      Best best;
      best.compare(a, even, 0);
      ask(even, (2 * own + 2) % SETS);  // behind the last one the first of the next tile
      best.compare(a, odd, 8 * PRODUCTS);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        for (int step = 1; step < 4; step *= 2) {
          float other = __shfl_xor_sync(FULL_WARP, best.score[i], step);
          int at = __shfl_xor_sync(FULL_WARP, best.point[i], step);
          if (other > best.score[i] || (other == best.score[i] && at < best.point[i])) best.score[i] = other, best.point[i] = at;
        }
        if (c == 0) indexes[(row + 8 * i) * BOOK_GROUPS + group] = best.point[i];
      }
    }
  }
};

// This warp's rows of the tile, every STORE_WARPS-th, are ``live`` or not; all threads of the block take part.
template <bool FITTED, int ROWS>
DEVICE void store_nearest(const Points& points, Search& search, int head, float gain, u8* const (&rows)[ROWS],
                          const bool (&live)[ROWS], const float* tile_y, float* memory) {
  float* scales = memory;
  u8* indexes = (u8*)(memory + VECTORS);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto sum = [](float a, float b) { return a + b; };
  float squares[ROWS], scale[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    squares[r] = 0;
    for (int channel = lane; channel < HEAD_DIM; channel += 32) {
      float y = tile_y[(warp + STORE_WARPS * r) * Y_STRIDE + channel];
      squares[r] += y * y;
    }
  }
  reduce(squares, sum);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    scale[r] = fmaxf(sqrtf(squares[r] / HEAD_DIM), 1e-8f);
    if (lane == 0) scales[warp + STORE_WARPS * r] = scale[r];
  }
  __syncthreads();
  search.find(points, head, tile_y, scales, indexes);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int row = warp + STORE_WARPS * r;
    bool broken = squares[r] != squares[r];
    float along[1] = {0};
    for (int group = lane; group < BOOK_GROUPS; group += 32) {
      int index = indexes[row * BOOK_GROUPS + group];
      if (live[r]) rows[r][head * KeyRows::CODE_BYTES + group] = broken ? 0 : index;
      if (FITTED) {
        uint2 p = *points.of(head, group, index);
        const float* y = tile_y + row * Y_STRIDE + 4 * group;
        along[0] += points.factor[head * BOOK_GROUPS + group] *
                    (y[0] * low_half<true>(p.x) + y[1] * high_half<true>(p.x) + y[2] * low_half<true>(p.y) + y[3] * high_half<true>(p.y));
      }
    }
    if (FITTED) {
      reduce(along, sum);
      scale[r] = fitted_scale(scale[r], gain, squares[r], along[0]);
    }
    if (lane == 0 && live[r])
      store_scale(rows[r] + KeyRows::PARAMS_OFFSET + head * KeyRows::PARAM_BYTES, broken ? as_float(0x7fc00000u) : storable(scale[r]));
  }
}
