// Keys as indexes of the nearest points of a codebook that all kv heads and groups share, see codebook.py: a vector by one
// warp, which looks for the points of 32 groups at a time.
//
// Half the squared distance of x and p is |x|^2 / 2 - x.p + |p|^2 / 2: for 16 groups and eight points a tensor-core product
// of depth 16 of float16 numbers. Those of a group are two terms of each channel of x, and constants for the two bytes of
// |p|^2; the sum begins at |x|^2 / 2. Distances are no less than zero, so they order as the integers that their bits are, of
// which one instruction takes the least of three. Only which eight points the least is one of is kept: they are compared
// again, one group a lane, by the scores of the reference.
#pragma once

#include "nearest.cuh"

constexpr int CHUNK = 8;  // neighbouring points, of one lane of a product's row: lane c has points 64 c to 64 c + 63
constexpr int CHUNK_WORDS = 2 * CHUNK + 4;  // in memory: chunks begin at different banks
constexpr int CHUNKS_OF_LANE = 64 / CHUNK;
constexpr int OPERAND_WORDS = 32 * 32 * 2;  // of products, see books.py
// Shared memory behind tiles: operands, points, and factors of all groups.
constexpr int SHARED_BOOK_WORDS = OPERAND_WORDS + 256 / CHUNK * CHUNK_WORDS;
constexpr int SHARED_BOOK_FLOATS = SHARED_BOOK ? SHARED_BOOK_WORDS + KV_HEADS * BOOK_GROUPS : 0;
// Largest channel, in units of the points' whole numbers, for which two float16 terms and a sum that begins at |x|^2 / 2
// are as good as float32. All points are compared with what is further out.
constexpr float FURTHEST = 1024;

struct SharedBook {
  const u32* memory;

  // By all threads of the block. It never changes, so the launch before this one may still run.
  DEVICE SharedBook(const Points& points, float* to) : memory((const u32*)to) {
    const uint4* words = (const uint4*)points.terms;
    for (int i = threadIdx.x; i < SHARED_BOOK_WORDS / 4; i += 32 * STORE_WARPS) ((uint4*)to)[i] = words[i];
    for (int i = threadIdx.x; i < KV_HEADS * BOOK_GROUPS; i += 32 * STORE_WARPS) to[SHARED_BOOK_WORDS + i] = points.factor[i];
  }

  DEVICE const float* factors(int head) const { return (const float*)memory + SHARED_BOOK_WORDS + head * BOOK_GROUPS; }
  // Of this lane, of 16 points: operands of two products.
  DEVICE uint4 operands(int pair) const { return ((const uint4*)memory)[32 * pair + threadIdx.x % 32]; }
  DEVICE const u32* points(int chunk) const { return memory + OPERAND_WORDS + chunk * CHUNK_WORDS; }
};

// A point's channels times those of x.
DEVICE float along_point(float4 x, u32 low, u32 high) {
  return x.x * low_half<false>(low) + x.y * high_half<false>(low) + x.z * low_half<false>(high) + x.w * high_half<false>(high);
}

// x.p - |p|^2 / 2
DEVICE float score(float4 x, u32 low, u32 high) {
  float a = low_half<false>(low), b = high_half<false>(low), c = low_half<false>(high), d = high_half<false>(high);
  float first = a * (x.x - 0.5f * a) + b * (x.y - 0.5f * b), second = c * (x.z - 0.5f * c) + d * (x.w - 0.5f * d);
  return first + second;
}

// Groups 0 to 31 of a warp, a lane each: lane l is at ``place(l)``, four floats of shared memory that are used up.
struct SharedSearch {
  const SharedBook& book;

  // The index of the point nearest to x, this lane's channels of group threadIdx.x % 32.
  template <class Place>
  DEVICE int find(float4 x, Place place) const {
    int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
    u32 first = pack_half(x.x, x.y), second = pack_half(x.z, x.w);
    uint4 terms = {first, second, pack_half(x.x - low_half<false>(first), x.y - high_half<false>(first)),
                   pack_half(x.z - low_half<false>(second), x.w - high_half<false>(second))};
    *(uint4*)place(lane) = terms;
    __syncwarp();
    float half_square = 0.5f * (x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    // Every lane's numbers of groups row and row + 8, then of those 16 further. The assembler would copy registers for every
    // product if it knew which of them are equal, so equal ones are exchanged, too.
    u32 a[2][4], constants = c == 0 ? pack_half(128, 0.5f) : 0;
    float begin[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      a[i / 2][i % 2] = ((const u32*)place(row + 8 * i))[c];
      a[i / 2][2 + i % 2] = __shfl_sync(FULL_WARP, constants, lane);
#pragma unroll
      for (int j = 0; j < 2; j++) begin[i / 2][i % 2 * 2 + j] = __shfl_sync(FULL_WARP, half_square, row + 8 * i);
    }
    int least[4], chunks = 0, chunk[4];
#pragma unroll
    for (int i = 0; i < 4; i++) least[i] = 0x7fffffff, chunk[i] = 0;
#pragma unroll
    for (int q = 0; q < CHUNKS_OF_LANE; q++) {
      float d[2][CHUNK / 2][4];
#pragma unroll
      for (int t = 0; t < CHUNK / 2; t += 2) {
        uint4 b = book.operands(CHUNK / 4 * q + t / 2);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          mma_half(d[m][t], begin[m], a[m], b.x, b.y);
          mma_half(d[m][t + 1], begin[m], a[m], b.z, b.w);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int found = least[i];
#pragma unroll
        for (int t = 0; t < CHUNK / 2; t++)
          found = min(found, min((int)__float_as_uint(d[i / 2][t][i % 2 * 2]), (int)__float_as_uint(d[i / 2][t][i % 2 * 2 + 1])));
        if (found < least[i]) chunk[i] = q;
        least[i] = found;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      ((int*)place(row + 8 * i))[c] = least[i];
      chunks |= chunk[i] << 8 * i;
    }
    __syncwarp();
    // Of lanes with the same distance the first, of which all points come before those of the next.
    const int* of = (const int*)place(lane);
    int distance = of[0], nearest = 0;
#pragma unroll
    for (int i = 1; i < 4; i++)
      if (of[i] < distance) distance = of[i], nearest = i;
    int candidate = CHUNKS_OF_LANE * nearest + (__shfl_sync(FULL_WARP, chunks, 4 * (lane % 8) + nearest) >> 8 * (lane / 8) & 0xff);
    bool far = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))) > FURTHEST;
    int last = far ? 256 / CHUNK - 1 : candidate;
    float best = minus_infinity();
    int index = CHUNK * (far ? 0 : candidate);
    for (int at = far ? 0 : candidate; at <= last; at++) {
      const u32* points = book.points(at);
#pragma unroll
      for (int i = 0; i < CHUNK; i += 2) {
        uint4 two = *(const uint4*)(points + 2 * i);
        float even = score(x, two.x, two.y), odd = score(x, two.z, two.w);
        if (even > best) best = even, index = CHUNK * at + i;
        if (odd > best) best = odd, index = CHUNK * at + i + 1;
      }
    }
    return index;
  }
};

// This warp's rows of the tile, every STORE_WARPS-th, are ``live`` or not.
template <bool FITTED, int ROWS>
DEVICE void store_nearest_shared(const SharedBook& book, float gain, u8* const (&rows)[ROWS], const int (&heads)[ROWS],
                                 const bool (&live)[ROWS], float* tile_y) {
  // Of 32 groups a vector's, or of half of one, or of two.
  constexpr int PASSES = ROWS * BOOK_GROUPS / 32, AT_ONCE = BOOK_GROUPS < 32 ? 32 / BOOK_GROUPS : 1;
  static_assert(ROWS * BOOK_GROUPS % 32 == 0, "passes are whole");
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto sum = [](float a, float b) { return a + b; };
  float squares[ROWS], scale[ROWS], along[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    squares[r] = along[r] = 0;
    for (int channel = lane; channel < HEAD_DIM; channel += 32) {
      float y = tile_y[(warp + STORE_WARPS * r) * Y_STRIDE + channel];
      squares[r] += y * y;
    }
  }
  reduce(squares, sum);
#pragma unroll
  for (int r = 0; r < ROWS; r++) scale[r] = fmaxf(sqrtf(squares[r] / HEAD_DIM), 1e-8f);
  __syncwarp();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int first = 32 * pass / BOOK_GROUPS;  // row
    if (!live[first]) continue;                 // then the next one is not either
    auto place = [&](int item) {
      int at = 32 * pass + item;
      return tile_y + (warp + STORE_WARPS * (at / BOOK_GROUPS)) * Y_STRIDE + 4 * (at % BOOK_GROUPS);
    };
    const int other = first + AT_ONCE - 1, group = (32 * pass + lane) % BOOK_GROUPS;
    bool later = AT_ONCE > 1 && lane >= BOOK_GROUPS;
    int head = later ? heads[other] : heads[first];
    float4 y = *(const float4*)place(lane);
    float factor = book.factors(head)[group], unit = 1.0f / ((later ? scale[other] : scale[first]) * factor);
    float4 x = make_float4(y.x * unit, y.y * unit, y.z * unit, y.w * unit);
    int index = SharedSearch{book}.find(x, place);
    bool broken = later ? squares[other] != squares[other] : squares[first] != squares[first];
    if (later ? live[other] : live[first])
      (later ? rows[other] : rows[first])[head * KeyRows::CODE_BYTES + group] = broken ? 0 : index;
    if (FITTED) {
      const u32* point = book.points(index / CHUNK) + index % CHUNK * 2;
      float of = factor * along_point(y, point[0], point[1]);
      along[first] += later ? 0 : of;
      if (AT_ONCE > 1) along[other] += later ? of : 0;
    }
  }
  if (FITTED) reduce(along, sum);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    bool broken = squares[r] != squares[r];
    if (FITTED) scale[r] = fitted_scale(scale[r], gain, squares[r], along[r]);
    if (lane == 0 && live[r])
      store_scale(rows[r] + KeyRows::PARAMS_OFFSET + heads[r] * KeyRows::PARAM_BYTES, broken ? as_float(0x7fc00000u) : storable(scale[r]));
  }
}
