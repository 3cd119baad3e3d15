// Store of a decode step: rotate, clip, quantize and pack one token per request into the cache, and rotate its queries.
//
// A block takes tiles of up to 16 vectors: of keys, of values or of queries; few keys and values are spread over twice the
// blocks. Its warps hold 16 columns of the rotation each, split into 16-bit terms that together have float32 precision;
// they are read before the kernel waits for its predecessor, because they never change, and stay for all tiles of the
// block: they are 96 KB, a tile is 4. Keys and values then go through shared memory, and a warp does the rest of a
// vector on its own.
#include "quantize.cuh"
#include "rotation.cuh"

constexpr int K_TERMS = OSCAR_K_TERMS, V_TERMS = OSCAR_V_TERMS, Q_TERMS = OSCAR_Q_TERMS;  // 0: no rotation
constexpr int K_SETS = OSCAR_K_SETS, V_SETS = OSCAR_V_SETS, Q_SETS = OSCAR_Q_SETS;  // matrices: 1 or one per kv head
constexpr bool HAS_CENTER = OSCAR_HAS_CENTER;
constexpr bool K_FITTED = OSCAR_K_FITTED, V_FITTED = OSCAR_V_FITTED;  // see fitted_parameters in codec.py

constexpr int STORE_THREADS = STORE_WARPS * 32;
constexpr int Y_STRIDE = HEAD_DIM + 4;

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

DEVICE void store_window(u16* window, i64 slot, int head, const float* y) {
  if (slot < 0) return;
  u16* at = window + (slot * KV_HEADS + head) * HEAD_DIM;
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

template <int SETS, bool CENTER, int TERMS>
DEVICE void rotate_tile(const Side& side, Columns<TERMS>& columns, int tile, int tokens, int vectors, float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 x[2][UNITS];
  Vector<KV_HEADS, SETS> of[2] = {{tile, lane / 4, tokens, vectors}, {tile, lane / 4 + 8, tokens, vectors}};
  for (int i = 0; i < 2; i++) load_vector(x[i], side, of[i].token, of[i].head);
  float y[2][4] = {};
  columns.multiply(y, x[0], x[1]);
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int column = 16 * warp + 8 * t + 2 * (lane % 4);
      float2 pair = make_float2(y[t][2 * i] * side.unscale, y[t][2 * i + 1] * side.unscale);
      if (CENTER) {
        const float* center = side.center + of[i].head * HEAD_DIM + column;
        pair = make_float2(pair.x - center[0], pair.y - center[1]);
      }
      *(float2*)(tile_y + (lane / 4 + 8 * i) * Y_STRIDE + column) = pair;
    }
}

template <class Rows, bool ROTATED, int SETS, bool CENTER, bool FITTED>
DEVICE void quantize_tile(const Side& side, const Slots& slots, int tile, int tokens, int vectors, float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < VECTORS; row += STORE_WARPS) {
    Vector<KV_HEADS, SETS> of(tile, row, tokens, vectors);
    if (!of.live) break;
    float* y = tile_y + row * Y_STRIDE;
    if constexpr (!ROTATED) {
      const u16* x = side.x + of.token * side.token_stride + of.head * side.head_stride;
      for (int channel = 2 * lane; channel < HEAD_DIM; channel += 64) {
        u32 pair = *(const u32*)(x + channel);
        y[channel] = low_half<X_BF16>(pair) - (CENTER ? side.center[of.head * HEAD_DIM + channel] : 0);
        y[channel + 1] = high_half<X_BF16>(pair) - (CENTER ? side.center[of.head * HEAD_DIM + channel + 1] : 0);
      }
      __syncwarp();
    }
    if (RING > 0) store_window(side.ring, slots.ring[of.token], of.head, y);
    if (SINK > 0) store_window(side.sink, slots.sink[of.token], of.head, y);
    Vectors<Rows> v;
#pragma unroll
    for (int i = 0; i < Vectors<Rows>::BYTES; i++)
#pragma unroll
      for (int j = 0; j < Vectors<Rows>::PLANES; j++) v.y[i][j] = v.has_byte(i) ? y[Rows::channel(j, lane + 32 * i)] : 0;
    Vectors<Rows> whole = v;
    clip(v, side.rank);
    quantize<FITTED>(v, whole, side.gain, side.rows + slots.row[of.token] * Rows::ROW_BYTES, of.head);
  }
}

template <class Rows, int TERMS, int SETS, bool CENTER, bool FITTED>
DEVICE void store_tiles(const Side& side, const Slots& slots, Tiles<KV_HEADS, SETS> tiles, int tokens, int vectors,
                        bool decoding, float* tile_y) {
  if constexpr (TERMS > 0) {
    Columns<TERMS> columns(tiles.template terms_of<TERMS>(side.terms));
    start(decoding);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
      if (tile > tiles.begin) __syncthreads();  // the last tile has been read
      rotate_tile<SETS, CENTER>(side, columns, tile, tokens, vectors, tile_y);
      __syncthreads();
      quantize_tile<Rows, true, SETS, CENTER, FITTED>(side, slots, tile, tokens, vectors, tile_y);
    }
  } else {
    start(decoding);
    for (int tile = tiles.begin; tile < tiles.end; tile++)
      quantize_tile<Rows, false, SETS, CENTER, FITTED>(side, slots, tile, tokens, vectors, tile_y);
  }
}

template <int SETS, int TERMS>
DEVICE void rotate_queries(const Queries& queries, Columns<TERMS>& columns, int tile, int tokens) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Vector<Q_HEADS, SETS> of[2] = {{tile, lane / 4, tokens, VECTORS}, {tile, lane / 4 + 8, tokens, VECTORS}};
  uint4 x[2][UNITS];
  for (int i = 0; i < 2; i++) load_vector(x[i], queries, of[i].token, of[i].head);
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
DEVICE void copy_queries(const Queries& queries, int tile, int tokens) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < VECTORS; row += STORE_WARPS) {
    Vector<Q_HEADS, SETS> vector(tile, row, tokens, VECTORS);
    const u16* x = queries.x + vector.token * queries.token_stride + vector.head * queries.head_stride;
    u16* out = queries.out + ((i64)vector.token * Q_HEADS + vector.head) * HEAD_DIM;
    if (vector.live)
      for (int channel = 2 * lane; channel < HEAD_DIM; channel += 64) *(u32*)(out + channel) = *(const u32*)(x + channel);
  }
}

template <int TERMS, int SETS>
DEVICE void store_queries(const Queries& queries, Tiles<Q_HEADS, SETS> tiles, int tokens, bool decoding) {
  if constexpr (TERMS > 0) {
    Columns<TERMS> columns(tiles.template terms_of<TERMS>(queries.terms));
    start(decoding);
    for (int tile = tiles.begin; tile < tiles.end; tile++) rotate_queries<SETS>(queries, columns, tile, tokens);
  } else {
    start(decoding);
    for (int tile = tiles.begin; tile < tiles.end; tile++) copy_queries<SETS>(queries, tile, tokens);
  }
}

// Grid: blocks of ``span`` tiles of ``vectors`` keys, of as many values, of VECTORS queries.
extern "C" __global__ void __launch_bounds__(STORE_THREADS) oscar_store(
    Side keys, Side values, Queries queries, Slots slots, int tokens, int vectors, int span, int decoding) {
  __shared__ float tile_y[VECTORS * Y_STRIDE];
  int keys_end = blocks_of<KV_HEADS, K_SETS>(tokens, vectors, span), block = blockIdx.x;
  int values_end = keys_end + blocks_of<KV_HEADS, V_SETS>(tokens, vectors, span);
  if (block < keys_end)
    store_tiles<KeyRows, K_TERMS, K_SETS, HAS_CENTER, K_FITTED>(
        keys, slots, {block, tokens, vectors, span}, tokens, vectors, decoding, tile_y);
  else if (block < values_end)
    store_tiles<ValueRows, V_TERMS, V_SETS, false, V_FITTED>(
        values, slots, {block - keys_end, tokens, vectors, span}, tokens, vectors, decoding, tile_y);
  else
    store_queries<Q_TERMS, Q_SETS>(queries, {block - values_end, tokens, VECTORS, span}, tokens, decoding);
}
