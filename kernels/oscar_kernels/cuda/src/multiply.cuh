// The end of a launch whose values are stored multiplied: partial results become one per query head, and that is multiplied
// by the matrix of its kv head.
//
// A matrix is 64 times as large as the vectors of a request that it multiplies. So every block takes vectors of one matrix,
// of many requests where there are many, and waits for all blocks of the launch: they end together and are co-resident, as
// in merge.cuh. Its columns of the matrix are on their way to registers while it waits.
#pragma once

#include "merge.cuh"

constexpr int TERMS = maximum(READING_TERMS, 1);  // where nothing is multiplied this compiles and is not called
constexpr int TILE_ROWS = 16;               // vectors of a tensor-core product
constexpr int TILE_STRIDE = HEAD_DIM + 32;  // of a vector in shared memory, so that no two of a load share a bank
constexpr int READING_AHEAD = 5;             // partial results that a thread asks for at once
constexpr int COLUMN_TILES = HEAD_DIM / 8;
constexpr int OWN_TILES = (COLUMN_TILES + MATH_WARPS - 1) / MATH_WARPS;  // of a warp: every MATH_WARPS-th

// What outputs are multiplied by.
struct Reading {
  const uint4* terms;  // [set][term][column][channel], 16 bits each
  float unscale;       // of the terms

  // What lies in device memory at the end lies there at the beginning, too; each block asks for a share of it.
  DEVICE void ask() const {
    constexpr int BYTES = READING_SETS * TERMS * HEAD_DIM * HEAD_DIM * 2;
    int share = (BYTES / 16 + own_blocks() - 1) / own_blocks() * 16, begin = own_block() * share;
    if (begin < BYTES) prefetch_bulk((const u8*)terms + begin, min(share, BYTES - begin));
  }
};

// This warp's columns of a matrix: lane l has, of column l / 4 of a tile, channels 32 u + 8 (l % 4) + 0..7.
struct ReadingColumns {
  static constexpr int COUNT = OWN_TILES * TERMS * UNITS;
  static constexpr bool KEPT = COUNT <= 16;  // in registers
  uint4 kept[KEPT ? COUNT : 1];
  const uint4* terms;

  DEVICE static bool exists(int own) { return threadIdx.x / 32 + own * MATH_WARPS < COLUMN_TILES; }
  DEVICE static int first_column(int own) { return 8 * (threadIdx.x / 32 + own * MATH_WARPS); }

  DEVICE uint4 load(int own, int term, int unit) const {
    int lane = threadIdx.x % 32, column = first_column(own) + lane / 4;
    return terms[((term * HEAD_DIM + column) * HEAD_DIM + 32 * unit + 8 * (lane % 4)) / 8];
  }
  DEVICE ReadingColumns(const Reading& reading, int set)
      : terms(reading.terms + set * (TERMS * HEAD_DIM * HEAD_DIM / 8)) {
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (exists(i / (TERMS * UNITS)))
          kept[i] = load(i / (TERMS * UNITS), i / UNITS % TERMS, i % UNITS);
    }
  }

  // sum = rows l / 4 and l / 4 + 8 of a tile times columns 2 (l % 4) and the next; small terms are added first.
  DEVICE void multiply(float (&sum)[4], int own, const u16* tile) const {
    int lane = threadIdx.x % 32;
    const u16* first = tile + lane / 4 * TILE_STRIDE + 8 * (lane % 4);
    const u16* second = first + 8 * TILE_STRIDE;
    float out[TERMS][4] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      uint4 x = *(const uint4*)(first + 32 * u), y = *(const uint4*)(second + 32 * u);
#pragma unroll
      for (int term = 0; term < TERMS; term++) {
        uint4 b = KEPT ? kept[KEPT ? (own * TERMS + term) * UNITS + u : 0] : load(own, term, u);
        mma_k16<Q_BF16>(out[term], x.x, y.x, x.y, y.y, b.x, b.y);
        mma_k16<Q_BF16>(out[term], x.z, y.z, x.w, y.w, b.z, b.w);
      }
    }
#pragma unroll
    for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] += out[term][i];
  }
};

// The vectors of a block: rows of passes, of the kv heads of one matrix, pass after pass.
struct OwnVectors {
  static constexpr int OF_SET = ROWS / READING_SETS;  // of a pass
  int set, begin, end;

  DEVICE explicit OwnVectors(int batch) {
    int all = batch * OF_SET, blocks = own_blocks() / READING_SETS;  // as many for each matrix
    int height = divide_up(all, blocks), used = divide_up(all, height);
    set = own_block() / used;
    begin = (own_block() - set * used) * height;
    end = set < READING_SETS ? min(begin + height, all) : begin;
  }
  DEVICE bool none() const { return begin >= end; }
  DEVICE static int pass(int vector) { return vector / OF_SET; }
  DEVICE int row(int vector) const { return set * OF_SET + vector % OF_SET; }
};

DEVICE void multiply(const Cut& cut, const Plan& plan, int batch, const Partials& partials, const Result& result,
                     const Reading& reading, char* memory) {
  constexpr int CHUNKS_OF_ROW = HEAD_DIM / CHUNK;
  Partial* rows = (Partial*)memory;
  u16* tile = (u16*)(rows + MATH_THREADS);
  Parts* parts = (Parts*)(tile + TILE_ROWS * TILE_STRIDE);
  static_assert(MATH_THREADS * sizeof(Partial) + TILE_ROWS * (TILE_STRIDE * 2 + sizeof(Parts)) <= STAGES * STAGE_BYTES,
                "they lie where stages were");
  OwnVectors vectors(batch);
  ReadingColumns columns(reading, min(vectors.set, READING_SETS - 1));
  auto find_parts = [&](int first) {
    int vector = first + threadIdx.x;
    if (threadIdx.x >= TILE_ROWS || vector >= vectors.end) return;
    int pass = vectors.pass(vector), begin = plan.before(pass), end = plan.after(pass);
    parts[threadIdx.x] = {pass, 0, 0};
    if (begin < end) parts[threadIdx.x] = Parts::of(pass, begin, end - plan.borders(pass).last_cost(), cut);
  };
  u32* counter = partials.counters;
  named_barrier(EVERYONE, MATH_THREADS);
  if (threadIdx.x == 0) {
    wait_for_predecessor();  // a block without work has not: the launch before may still use the counter and read results
    __threadfence();
    atomicAdd(counter, vectors.none() ? LEFT + 1 : 1);
  }
  if (vectors.none()) return;
  find_parts(vectors.begin);
  if (threadIdx.x == 0) while ((load_acquire(counter) & (LEFT - 1)) < own_blocks()) {}
  named_barrier(EVERYONE, MATH_THREADS);
  // Who leaves last makes the counter ready for the next launch.
  u32 left = threadIdx.x == 0 ? atomicAdd(counter, LEFT) / LEFT + 1 : 0;
  for (int first = vectors.begin; first < vectors.end; first += TILE_ROWS) {
    int count = min(TILE_ROWS, vectors.end - first);
    auto parts_of = [&](int chunk, bool live, int& of_pass) {
      if (!live) return Parts{};
      int row = chunk / CHUNKS_OF_ROW;
      of_pass = vectors.row(first + row) * CHUNKS_OF_ROW + chunk % CHUNKS_OF_ROW;
      return parts[row];
    };
    merge_chunks<READING_AHEAD>(0, count * CHUNKS_OF_ROW, partials, rows, parts_of, [&](int chunk, int pass, int of_pass, const Partial& sum) {
      float inverse = sum.total == 0 ? 0 : 1.0f / sum.total;
      u16* at = tile + chunk / CHUNKS_OF_ROW * TILE_STRIDE + chunk % CHUNKS_OF_ROW * CHUNK;
      *(uint2*)at = make_uint2(pack_halves<Q_BF16>(sum.sum.x * inverse, sum.sum.y * inverse),
                               pack_halves<Q_BF16>(sum.sum.z * inverse, sum.sum.w * inverse));
      if (chunk % CHUNKS_OF_ROW == 0) result.write_lse(pass, of_pass / CHUNKS_OF_ROW, sum.top, sum.total);
    });
    named_barrier(EVERYONE, MATH_THREADS);
    if (first + TILE_ROWS < vectors.end) find_parts(first + TILE_ROWS);
#pragma unroll
    for (int own = 0; own < OWN_TILES; own++) {
      if (!columns.exists(own)) break;
      float y[4] = {};
      columns.multiply(y, own, tile);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int row = threadIdx.x % 32 / 4 + 8 * i, vector = first + row;
        float pair[2] = {y[2 * i], y[2 * i + 1]};
        int column = columns.first_column(own) + 2 * (threadIdx.x % 4);
        if (row < count) result.write(vectors.pass(vector), vectors.row(vector), column, pair, reading.unscale);
      }
    }
    named_barrier(EVERYONE, MATH_THREADS);
  }
  if (threadIdx.x == 0 && left == own_blocks()) *counter = 0;
}
