// Store of a decode step: rotate, clip, quantize and pack one token per request into the cache, and rotate its queries.
//
// A block takes tiles of up to 16 vectors: of keys, of values or of queries; few keys and values are spread over twice the
// blocks. Its warps hold 16 columns of the rotation each, split into 16-bit terms that together have float32 precision;
// they are read before the kernel waits for its predecessor, because they never change, and stay for all tiles of the
// block: they are 96 KB, a tile is 4. What the next tile needs of memory is on its way while a tile is worked on. Keys
// and values go through shared memory once they are rotated, and a warp does the rest of two vectors side by side.
#include "nearest_shared.cuh"

constexpr int K_TERMS = OSCAR_K_TERMS, V_TERMS = OSCAR_V_TERMS, Q_TERMS = OSCAR_Q_TERMS;  // 0: no rotation
constexpr int K_SETS = OSCAR_K_SETS, V_SETS = OSCAR_V_SETS, Q_SETS = OSCAR_Q_SETS;  // matrices: 1 or one per kv head
constexpr bool HAS_CENTER = OSCAR_HAS_CENTER;
constexpr bool K_FITTED = OSCAR_K_FITTED, V_FITTED = OSCAR_V_FITTED;  // see fitted_parameters in codec.py

constexpr int STORE_THREADS = STORE_WARPS * 32;
// A tile of keys with codebooks of their own has vectors of one kv head.
constexpr int K_TILE_SETS = HAS_BOOK && !SHARED_BOOK ? KV_HEADS : K_SETS;

struct Side {
  const u16* x;
  i64 token_stride, head_stride;
  const uint4* terms;  // [set][term][column / 16][channel / 32][2][lane], see cuda/store.py
  float unscale;       // of the terms
  const float* center;  // [KV_HEADS, HEAD_DIM]
  int rank;             // of the clip threshold among the magnitudes, 1 is the largest; 0: no clip
  float gain;           // of fitted scales
  u8* rows;
  u16 *ring, *sink;  // [tokens, KV_HEADS, HEAD_DIM]
};

struct Queries {
  const u16* x;
  i64 token_stride, head_stride;
  const uint4* terms;
  float unscale;
  u16* out;  // [tokens, Q_HEADS, HEAD_DIM]
};

struct Slots {
  const i64 *row, *ring, *sink;  // -1 in ring and sink: not there
};

DEVICE void store_window(u16* window, int slot, int head, const float* y) {
  if (slot < 0) return;
  u16* at = window + ((i64)slot * KV_HEADS + head) * HEAD_DIM;
  for (int channel = threadIdx.x % 32 * 2; channel < HEAD_DIM; channel += 64)
    *(u32*)(at + channel) = pack_halves<WINDOW_BF16>(y[channel], y[channel + 1]);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------
// Rotations are there from the start, the rest is the predecessor's work. What a decode step stores no decode kernel
// copies before its own wait, so that one may start.
DEVICE void start(bool decoding) {
  wait_for_predecessor();
  if (decoding) let_successor_start();
}

// What a tile of keys or values needs of memory.
template <int SETS, bool ROTATED>
struct Fetched {
  static constexpr int ROWS = VECTORS / STORE_WARPS;  // of a warp: every STORE_WARPS-th
  uint4 x[2][UNITS];                                  // rotated: rows lane / 4 and 8 further, as load_vector() has them
  u32 plain[ROWS][HEAD_DIM / 64];                     // else the warp's rows, channels 2 lane + 64 i and the next
  int row[ROWS], ring[ROWS], sink[ROWS];              // slots of the warp's rows

  DEVICE void fetch(const Side& side, const Slots& slots, Tile<KV_HEADS, SETS> tile) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (ROTATED) load_vectors(x, side, tile);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      Vector of = tile.at(warp + STORE_WARPS * r);
      row[r] = slots.row[of.token];
      if (RING > 0) ring[r] = slots.ring[of.token];
      if (SINK > 0) sink[r] = slots.sink[of.token];
      if constexpr (!ROTATED) {
        const u16* from = side.x + of.token * side.token_stride + of.head * side.head_stride + 2 * lane;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; i++) plain[r][i] = *(const u32*)(from + 64 * i);
      }
    }
  }
};

template <bool CENTER, int SETS, int TERMS>
DEVICE void rotate_tile(const Side& side, Columns<TERMS>& columns, const uint4 (&x)[2][UNITS],
                        Tile<KV_HEADS, SETS> tile, float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float y[2][4] = {};
  columns.multiply(y, x[0], x[1]);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = lane / 4 + 8 * i, head = tile.at(row).head;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      int column = 16 * warp + 8 * t + 2 * (lane % 4);
      float2 pair = make_float2(y[t][2 * i] * side.unscale, y[t][2 * i + 1] * side.unscale);
      if (CENTER) {
        const float* center = side.center + head * HEAD_DIM + column;
        pair = make_float2(pair.x - center[0], pair.y - center[1]);
      }
      *(float2*)(tile_y + row * Y_STRIDE + column) = pair;
    }
  }
}

// Vectors without a rotation, widened.
template <bool CENTER, int SETS>
DEVICE void widen_tile(const Side& side, const Fetched<SETS, false>& fetched, Tile<KV_HEADS, SETS> tile, float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Fetched<SETS, false>::ROWS; r++) {
    int row = warp + STORE_WARPS * r, head = tile.at(row).head;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; i++) {
      int channel = 2 * lane + 64 * i;
      u32 pair = fetched.plain[r][i];
      float2 y = make_float2(low_half<X_BF16>(pair), high_half<X_BF16>(pair));
      if (CENTER) {
        const float* center = side.center + head * HEAD_DIM + channel;
        y = make_float2(y.x - center[0], y.y - center[1]);
      }
      *(float2*)(tile_y + row * Y_STRIDE + channel) = y;
    }
  }
}

// N of the warp's rows, from the ``first`` on.
template <class Rows, bool FITTED, int N, int SETS, bool ROTATED>
DEVICE void quantize_rows(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile, int first,
                          const float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Vectors<Rows> v[N], whole[N];
  u8* rows[N];
  int heads[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    int r = first + n, row = warp + STORE_WARPS * r;
    heads[n] = tile.at(row).head;
    rows[n] = side.rows + (i64)fetched.row[r] * Rows::ROW_BYTES;
    const float* y = tile_y + row * Y_STRIDE;
    if (RING > 0) store_window(side.ring, fetched.ring[r], heads[n], y);
    if (SINK > 0) store_window(side.sink, fetched.sink[r], heads[n], y);
#pragma unroll
    for (int i = 0; i < Vectors<Rows>::BYTES; i++)
#pragma unroll
      for (int j = 0; j < Vectors<Rows>::PLANES; j++)
        v[n].y[i][j] = Vectors<Rows>::has_byte(i) ? y[Rows::channel(j, lane + 32 * i)] : 0;
    whole[n] = v[n];
  }
  clip(v, side.rank);
  if constexpr (Rows::CODING == SYMMETRIC) quantize_symmetric<FITTED>(v, whole, side.gain, rows, heads);
  else quantize<FITTED>(v, whole, side.gain, rows, heads);
}

template <class Rows, bool FITTED, int SETS, bool ROTATED>
DEVICE void quantize_tile(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile,
                          const float* tile_y) {
  constexpr int ROWS = Fetched<SETS, ROTATED>::ROWS, N = ROWS > 1 ? 2 : 1;
  int warp = threadIdx.x / 32;
#pragma unroll
  for (int first = 0; first < ROWS; first += N) {
    if (tile.at(warp + STORE_WARPS * (first + N - 1)).live)
      quantize_rows<Rows, FITTED, N>(side, fetched, tile, first, tile_y);
    else if (N > 1 && tile.at(warp + STORE_WARPS * first).live)
      quantize_rows<Rows, FITTED, 1>(side, fetched, tile, first, tile_y);
  }
}

// How a side is quantized: what it needs from before the launch before this one ends, and a tile.
struct Quantized {
  static constexpr bool AHEAD = true, WHOLE = false;  // the next tile is asked for before; all warps take part in a vector
  DEVICE Quantized(const Points&, int, float*) {}

  template <class Rows, bool FITTED, int SETS, bool ROTATED>
  DEVICE void tile(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile, float* tile_y) {
    quantize_tile<Rows, FITTED>(side, fetched, tile, tile_y);
  }
};

// Of a tile with a codebook the warp's rows: windows are stored.
template <int ROWS>
struct LookedUp {
  u8* rows[ROWS];
  int heads[ROWS];
  bool live[ROWS];

  template <int SETS, bool ROTATED>
  DEVICE LookedUp(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile, const float* tile_y) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      int row = threadIdx.x / 32 + STORE_WARPS * r;
      Vector of = tile.at(row);
      live[r] = of.live;
      heads[r] = of.head;
      rows[r] = side.rows + (i64)fetched.row[r] * KeyRows::ROW_BYTES;
      if (RING > 0 && live[r]) store_window(side.ring, fetched.ring[r], heads[r], tile_y + row * Y_STRIDE);
      if (SINK > 0 && live[r]) store_window(side.sink, fetched.sink[r], heads[r], tile_y + row * Y_STRIDE);
    }
  }
};

struct OfOwnBooks {
  static constexpr bool AHEAD = false, WHOLE = true;  // points take the registers
  const Points& points;
  Search search;
  float* memory;
  DEVICE OfOwnBooks(const Points& points, int head, float* memory) : points(points), search(points, head), memory(memory) {}

  template <class Rows, bool FITTED, int SETS, bool ROTATED>
  DEVICE void tile(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile, float* tile_y) {
    LookedUp<Fetched<SETS, ROTATED>::ROWS> of(side, fetched, tile, tile_y);
    store_nearest<FITTED>(points, search, tile.set, side.gain, of.rows, of.live, tile_y, memory);
  }
};

struct OfSharedBook {
  static constexpr bool AHEAD = true, WHOLE = true;  // all warps copy the book
  SharedBook book;
  DEVICE OfSharedBook(const Points& points, int, float* memory) : book(points, memory) {}

  template <class Rows, bool FITTED, int SETS, bool ROTATED>
  DEVICE void tile(const Side& side, const Fetched<SETS, ROTATED>& fetched, Tile<KV_HEADS, SETS> tile, float* tile_y) {
    LookedUp<Fetched<SETS, ROTATED>::ROWS> of(side, fetched, tile, tile_y);
    store_nearest_shared<FITTED>(book, side.gain, of.rows, of.heads, of.live, tile_y);
  }
};

template <class Rows>
using Method = typename Either<Rows::CODING != CODEBOOK, Quantized, typename Either<SHARED_BOOK, OfSharedBook, OfOwnBooks>::type>::type;

// ``tile_y`` has two tiles: one is read while the next is written, so that a tile needs one barrier.
template <class Rows, int TERMS, int MATRICES, bool CENTER, bool FITTED, int SETS>
DEVICE void store_tiles(const Side& side, const Points& points, const Slots& slots, Tiles<KV_HEADS, SETS> tiles,
                        bool decoding, float* tile_y) {
  Columns<TERMS> columns(tiles.template terms_of<TERMS, MATRICES>(side.terms));
  Method<Rows> method(points, tiles.set, tile_y + 2 * VECTORS * Y_STRIDE);
  start(decoding);
  Fetched<SETS, (TERMS > 0)> now, next;
  now.fetch(side, slots, tiles.tile(tiles.begin));
  for (int index = tiles.begin; index < tiles.end; index++) {
    Tile<KV_HEADS, SETS> tile = tiles.tile(index);
    float* y = tile_y + (index - tiles.begin) % 2 * (VECTORS * Y_STRIDE);
    if (Method<Rows>::AHEAD && index + 1 < tiles.end) next.fetch(side, slots, tiles.tile(index + 1));
    if constexpr (TERMS > 0) {
      rotate_tile<CENTER>(side, columns, now.x, tile, y);
      __syncthreads();
    } else {
      widen_tile<CENTER>(side, now, tile, y);
      if (Method<Rows>::WHOLE) __syncthreads();
      else __syncwarp();
    }
    method.template tile<Rows, FITTED>(side, now, tile, y);
    if (Method<Rows>::AHEAD) now = next;
    else if (index + 1 < tiles.end) now.fetch(side, slots, tiles.tile(index + 1));
  }
}

template <int SETS, int TERMS>
DEVICE void rotate_queries(const Queries& queries, Columns<TERMS>& columns, const uint4 (&x)[2][UNITS],
                           Tile<Q_HEADS, SETS> tile) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Vector of[2] = {tile.at(lane / 4), tile.at(lane / 4 + 8)};
  float y[2][4] = {};
  columns.multiply(y, x[0], x[1]);
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (of[i].live) {
        i64 at = ((i64)of[i].token * Q_HEADS + of[i].head) * HEAD_DIM + 16 * warp + 8 * t + 2 * (lane % 4);
        *(u32*)(queries.out + at) =
            pack_halves<X_BF16>(y[t][2 * i] * queries.unscale, y[t][2 * i + 1] * queries.unscale);
      }
}

template <int SETS>
DEVICE void copy_queries(const Queries& queries, Tile<Q_HEADS, SETS> tile) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < VECTORS; row += STORE_WARPS) {
    Vector vector = tile.at(row);
    const u16* x = queries.x + vector.token * queries.token_stride + vector.head * queries.head_stride;
    u16* out = queries.out + ((i64)vector.token * Q_HEADS + vector.head) * HEAD_DIM;
    if (vector.live)
      for (int channel = 2 * lane; channel < HEAD_DIM; channel += 64) *(u32*)(out + channel) = *(const u32*)(x + channel);
  }
}

template <int TERMS, int SETS>
DEVICE void store_queries(const Queries& queries, Tiles<Q_HEADS, SETS> tiles, bool decoding) {
  if constexpr (TERMS > 0) {
    Columns<TERMS> columns(tiles.template terms_of<TERMS, SETS>(queries.terms));
    start(decoding);
    uint4 now[2][UNITS], next[2][UNITS];
    load_vectors(now, queries, tiles.tile(tiles.begin));
    for (int index = tiles.begin; index < tiles.end; index++) {
      if (index + 1 < tiles.end) load_vectors(next, queries, tiles.tile(index + 1));
      rotate_queries(queries, columns, now, tiles.tile(index));
      for (int i = 0; i < 2 * UNITS; i++) now[i / UNITS][i % UNITS] = next[i / UNITS][i % UNITS];
    }
  } else {
    start(decoding);
    for (int index = tiles.begin; index < tiles.end; index++) copy_queries(queries, tiles.tile(index));
  }
}

// Grid: blocks of ``key_span`` tiles of ``vectors`` keys, of ``value_span`` tiles of as many values, of ``query_span`` tiles
// of VECTORS queries.
extern "C" __global__ void __launch_bounds__(STORE_THREADS) oscar_store(
    Side keys, Side values, Queries queries, Slots slots, int tokens, int vectors, int key_span, int value_span,
    int query_span, int decoding, Points points) {
  __shared__ float tile_y[2 * VECTORS * Y_STRIDE + INDEX_FLOATS + SHARED_BOOK_FLOATS];
  int keys_end = blocks_of<KV_HEADS, K_TILE_SETS>(tokens, vectors, key_span), block = blockIdx.x;
  int values_end = keys_end + blocks_of<KV_HEADS, V_SETS>(tokens, vectors, value_span);
  if (block < keys_end)
    store_tiles<KeyRows, K_TERMS, K_SETS, HAS_CENTER, K_FITTED>(
        keys, points, slots, Tiles<KV_HEADS, K_TILE_SETS>(block, tokens, vectors, key_span), decoding, tile_y);
  else if (block < values_end)
    store_tiles<ValueRows, V_TERMS, V_SETS, false, V_FITTED>(
        values, points, slots, Tiles<KV_HEADS, V_SETS>(block - keys_end, tokens, vectors, value_span), decoding, tile_y);
  else
    store_queries<Q_TERMS>(
        queries, Tiles<Q_HEADS, Q_SETS>(block - values_end, tokens, VECTORS, query_span), decoding);
}
