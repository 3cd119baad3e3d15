// Store of a decode step: rotate, clip, quantize and pack one token per request into the cache, and rotate its queries.
//
// A block takes up to 16 vectors: of keys, of values or of queries; few keys and values are spread over twice the blocks.
// Its warps hold 16 columns of the rotation each, split into 16-bit terms that together have float32 precision; they are
// read before the kernel waits for its predecessor, because they never change. Keys and values then go through shared
// memory, and a warp does the rest of a vector on its own.
#include "config.cuh"

constexpr bool X_BF16 = Q_BF16;  // keys, values and queries have one format
constexpr int K_TERMS = OSCAR_K_TERMS, V_TERMS = OSCAR_V_TERMS, Q_TERMS = OSCAR_Q_TERMS;  // 0: no rotation
constexpr int K_SETS = OSCAR_K_SETS, V_SETS = OSCAR_V_SETS, Q_SETS = OSCAR_Q_SETS;  // matrices: 1 or one per kv head
constexpr bool HAS_CENTER = OSCAR_HAS_CENTER;
constexpr bool K_FITTED = OSCAR_K_FITTED, V_FITTED = OSCAR_V_FITTED;  // see fitted_parameters in codec.py
constexpr float STRETCH = OSCAR_STRETCH_64THS / 64.0f;  // of codec.py

constexpr int VECTORS = OSCAR_VECTORS;
static_assert(VECTORS == 16, "a block's vectors are the rows of a tensor-core product");
constexpr int STORE_WARPS = HEAD_DIM / 16;
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

// ---- rotation ----------------------------------------------------------------------------------------------------
// This warp's 16 columns of a rotation. Those of up to 128 channels fit registers.
template <int TERMS>
struct Columns {
  static constexpr bool KEPT = HEAD_DIM <= 128;
  static constexpr int COUNT = UNITS * 2;
  uint4 kept[KEPT ? TERMS : 1][COUNT];
  const uint4* terms;

  DEVICE void load(int term, uint4 (&to)[COUNT]) const {
    const uint4* at = terms + ((term * STORE_WARPS + threadIdx.x / 32) * COUNT) * 32 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = at[i * 32];
  }
  DEVICE explicit Columns(const uint4* terms) : terms(terms) {
    if (KEPT) {
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

// Tiles of at most ``vectors`` vectors; none has heads of two of the SETS matrices.
template <int HEADS, int SETS>
DEVICE int tiles_of(int tokens, int vectors) {
  return SETS * ((tokens * (HEADS / SETS) + vectors - 1) / vectors);
}

// The terms of a tile's matrix. Matrices come one after the other, each with all its tiles.
template <int HEADS, int SETS, int TERMS>
DEVICE const uint4* terms_of(const uint4* terms, int tile, int tokens, int vectors) {
  if constexpr (SETS == 1) return terms;
  constexpr int UINT4S = TERMS * HEAD_DIM * HEAD_DIM / 8;
  return terms + tile / tiles_of<HEADS / SETS, 1>(tokens, vectors) * UINT4S;
}

// A vector of this block; past the end the last one.
template <int HEADS, int SETS>
struct Vector {
  int token, head;
  bool live;

  DEVICE Vector(int tile, int row, int tokens, int vectors) {
    constexpr int OF_SET = HEADS / SETS;
    int set = 0;
    if constexpr (SETS > 1) {
      int tiles = tiles_of<OF_SET, 1>(tokens, vectors);
      set = tile / tiles;
      tile %= tiles;
    }
    int index = tile * vectors + row;
    live = row < vectors && index < tokens * OF_SET;
    index = min(index, tokens * OF_SET - 1);
    token = index / OF_SET;
    head = set * OF_SET + index % OF_SET;
  }
};

// Channels 32 u + 8 (l % 4) + 0..7 of a vector.
template <class Input>
DEVICE void load_vector(uint4 (&x)[UNITS], const Input& input, int token, int head) {
  const u16* at = input.x + token * input.token_stride + head * input.head_stride + 8 * (threadIdx.x % 4);
#pragma unroll
  for (int u = 0; u < UNITS; u++) x[u] = *(const uint4*)(at + 32 * u);
}

// ---- one vector, by one warp ----------------------------------------------------------------------------------------
// Lane l has bytes l, l + 32, ... of the packed codes, of three bits of the low ones: Rows::channel(plane, byte).
template <class Rows>
struct Vectors {
  static constexpr int BYTES = (Rows::WIDTH + 31) / 32, PLANES = Rows::PLANES;
  float y[BYTES][PLANES];

  DEVICE static bool has_byte(int i) { return Rows::WIDTH % 32 == 0 || threadIdx.x % 32 + 32 * i < Rows::WIDTH; }
};

// Clamps to the rank-th largest magnitude, duplicates counted.
template <class Rows>
DEVICE void clip(Vectors<Rows>& v, int rank) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES;
  if (rank == 0) return;
  u32 bits[BYTES][PLANES];  // of magnitudes, which order as integers do
#pragma unroll
  for (int i = 0; i < BYTES; i++)
#pragma unroll
    for (int j = 0; j < PLANES; j++) bits[i][j] = v.has_byte(i) ? __float_as_uint(fabsf(v.y[i][j])) : 0;
  u32 threshold = 0;
  if (rank <= 16) {
    // Take the largest away, rank - 1 times.
#pragma unroll 1
    for (int round = 0; round < rank; round++) {
      u32 mine = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++) mine = max(mine, bits[i][j]);
      threshold = __reduce_max_sync(FULL_WARP, mine);
      bool taken = threadIdx.x % 32 != __ffs(__ballot_sync(FULL_WARP, mine == threshold)) - 1;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
          if (!taken && bits[i][j] == threshold) {
            bits[i][j] = 0;
            taken = true;
          }
    }
  } else {
    for (u32 bit = 1u << 30; bit > 0; bit >>= 1) {
      u32 trial = threshold | bit;
      int above = 0;
#pragma unroll
      for (int i = 0; i < BYTES; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++) above += __popc(__ballot_sync(FULL_WARP, v.has_byte(i) && bits[i][j] >= trial));
      if (above >= rank) threshold = trial;
    }
  }
  float tau = __uint_as_float(threshold);
#pragma unroll
  for (int i = 0; i < BYTES; i++)
#pragma unroll
    for (int j = 0; j < PLANES; j++) v.y[i][j] = fminf(fmaxf(v.y[i][j], -tau), tau);
}

DEVICE u32 narrow_scale(float x) { return SCALE_BF16 ? pack_bfloat(x, 0) & 0xffffu : pack_half(x, 0) & 0xffffu; }
// Rounds to the stored format and back.
DEVICE float stored(float x) {
  return SCALE_BYTES == 4 ? x : SCALE_BF16 ? low_half<true>(narrow_scale(x)) : low_half<false>(narrow_scale(x));
}

// Whether a channel of the vector is a NaN, which clip() and minima and maxima pass over.
template <class Rows>
DEVICE bool has_nan(const Vectors<Rows>& v) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < Vectors<Rows>::BYTES; i++)
#pragma unroll
    for (int j = 0; j < Vectors<Rows>::PLANES; j++) found |= v.y[i][j] != v.y[i][j];
  return __any_sync(FULL_WARP, found);
}

// Codes of oscar_kernels/codec.py, packed; ``row`` is the token's row, ``v`` is ``whole`` clipped.
template <bool FITTED, class Rows>
DEVICE void quantize(const Vectors<Rows>& v, const Vectors<Rows>& whole, float gain, u8* row, int head) {
  constexpr int BYTES = Vectors<Rows>::BYTES, PLANES = Vectors<Rows>::PLANES, GROUPS = Rows::GROUPS, GROUP = Rows::GROUP, BITS = Rows::BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  int lane = threadIdx.x % 32;
  bool broken = has_nan(whole);
  u32 packed[BYTES], high_bits[BYTES];  // of three bits the low two, and the others where they lie in the first half
#pragma unroll
  for (int i = 0; i < BYTES; i++) packed[i] = high_bits[i] = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    // Group g has planes [first, last) whole, or one span of 32 bytes in one plane, or several.
    auto mine = [&](int i, int j) { return Rows::group(j, 32 * i) == g; };
    float low = as_float(0x7f800000u), high = minus_infinity();
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++)
        if (mine(i, j) && v.has_byte(i)) {
          low = fminf(low, v.y[i][j]);
          high = fmaxf(high, v.y[i][j]);
        }
    for (int step = 1; step < 32; step *= 2) {
      low = fminf(low, __shfl_xor_sync(FULL_WARP, low, step));
      high = fmaxf(high, __shfl_xor_sync(FULL_WARP, high, step));
    }
    float scale = __fdiv_rn(fmaxf(high - low, 1e-8f), STEPS);
    if (SCALE_BYTES == 2 && !SCALE_BF16) {
      // Keeps the scale and zero = -low / scale within float16, and the scale normal.
      float largest = fmaxf(fabsf(low), fabsf(high));
      scale = fminf(fmaxf(fmaxf(scale, largest * (1.0f / 32768)), 0.00006103515625f), 65504.0f);
    }
    scale = stored(scale);
    float zero = stored(__fdiv_rn(-low, scale));
    // Sums of what is left without the middle of the range: small numbers, whatever the group's mean.
    float middle = 0.5f * (low + high), rest = 0, squares = 0, codes = 0, along = 0;
#pragma unroll
    for (int i = 0; i < BYTES; i++)
#pragma unroll
      for (int j = 0; j < PLANES; j++)
        if (mine(i, j)) {
          float code = floorf(__fadd_rn(__fadd_rn(__fdiv_rn(v.y[i][j], scale), zero), 0.5f));
          code = fminf(fmaxf(code, 0.0f), STEPS);
          if (BITS == 3) {
            packed[i] |= ((u32)code & 3) << (2 * j);
            high_bits[i] |= ((u32)code >> 2) << (2 * j + 2) % 8;
          } else {
            packed[i] |= (u32)code << (BITS * j);
          }
          if (FITTED && v.has_byte(i)) {
            float x = whole.y[i][j] - middle;
            rest += x;
            squares += x * x;
            codes += code;
            along += code * x;
          }
        }
    if (FITTED) {
      for (int step = 1; step < 32; step *= 2) {
        rest += __shfl_xor_sync(FULL_WARP, rest, step);
        squares += __shfl_xor_sync(FULL_WARP, squares, step);
        codes += __shfl_xor_sync(FULL_WARP, codes, step);
        along += __shfl_xor_sync(FULL_WARP, along, step);
      }
      float mean = rest / GROUP, mean_code = codes / GROUP;
      along -= mean_code * rest;
      float fitted = along > 0 ? gain * (squares - mean * rest) / along : scale;
      fitted = fminf(fmaxf(fitted, scale * (1 / STRETCH)), scale * STRETCH);
      if (SCALE_BYTES == 2 && !SCALE_BF16) fitted = fminf(fmaxf(fitted, 0.00006103515625f), 65504.0f);
      scale = stored(fitted);
      zero = stored(mean_code - (middle + mean) / scale);
    }
    if (broken) scale = zero = as_float(0x7fc00000u);
    if (lane == g) {
      u8* at = row + Rows::PARAMS_OFFSET + head * Rows::PARAM_BYTES + g * 2 * SCALE_BYTES;
      if (SCALE_BYTES == 4) {
        ((float*)at)[0] = scale;
        ((float*)at)[1] = zero;
      } else {
        *(u32*)at = narrow_scale(scale) | narrow_scale(zero) << 16;
      }
    }
  }
  u8* to = row + head * Rows::CODE_BYTES;
#pragma unroll
  for (int i = 0; i < BYTES; i++) {
    int b = lane + 32 * i;
    if (v.has_byte(i)) to[b] = broken ? 0 : packed[i];
    if (BITS == 3) {
      // A byte of high bits is of two bytes four apart, the second one bit further up.
      u32 both = high_bits[i] | __shfl_xor_sync(FULL_WARP, high_bits[i], 4) << 1;
      if (v.has_byte(i) && lane / 4 % 2 == 0) to[Rows::WIDTH + b / 8 * 4 + b % 4] = broken ? 0 : both;
    }
  }
}

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

template <class Rows, int TERMS, int SETS, bool CENTER, bool FITTED>
DEVICE void store_tile(const Side& side, const Slots& slots, int tile, int tokens, int vectors, bool decoding,
                       float* tile_y) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (TERMS > 0) {
    Columns<TERMS> columns(terms_of<KV_HEADS, SETS, TERMS>(side.terms, tile, tokens, vectors));
    start(decoding);
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
    __syncthreads();
  } else {
    start(decoding);
  }
  for (int row = warp; row < VECTORS; row += STORE_WARPS) {
    Vector<KV_HEADS, SETS> of(tile, row, tokens, vectors);
    if (!of.live) break;
    float* y = tile_y + row * Y_STRIDE;
    if constexpr (TERMS == 0) {
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

template <int TERMS, int SETS>
DEVICE void rotate_queries(const Queries& queries, int tile, int tokens, bool decoding) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Vector<Q_HEADS, SETS> of[2] = {{tile, lane / 4, tokens, VECTORS}, {tile, lane / 4 + 8, tokens, VECTORS}};
  if constexpr (TERMS > 0) {
    Columns<TERMS> columns(terms_of<Q_HEADS, SETS, TERMS>(queries.terms, tile, tokens, VECTORS));
    start(decoding);
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
  } else {
    start(decoding);
    for (int row = warp; row < VECTORS; row += STORE_WARPS) {
      Vector<Q_HEADS, SETS> vector(tile, row, tokens, VECTORS);
      const u16* x = queries.x + vector.token * queries.token_stride + vector.head * queries.head_stride;
      u16* out = queries.out + ((i64)vector.token * Q_HEADS + vector.head) * HEAD_DIM;
      if (vector.live)
        for (int channel = 2 * lane; channel < HEAD_DIM; channel += 64) *(u32*)(out + channel) = *(const u32*)(x + channel);
    }
  }
}

// Grid: tiles of ``vectors`` keys, of as many values, of VECTORS queries.
extern "C" __global__ void __launch_bounds__(STORE_THREADS) oscar_store(
    Side keys, Side values, Queries queries, Slots slots, int tokens, int vectors, int decoding) {
  __shared__ float tile_y[VECTORS * Y_STRIDE];
  int keys_end = tiles_of<KV_HEADS, K_SETS>(tokens, vectors), tile = blockIdx.x;
  int values_end = keys_end + tiles_of<KV_HEADS, V_SETS>(tokens, vectors);
  if (tile < keys_end)
    store_tile<KeyRows, K_TERMS, K_SETS, HAS_CENTER, K_FITTED>(keys, slots, tile, tokens, vectors, decoding, tile_y);
  else if (tile < values_end)
    store_tile<ValueRows, V_TERMS, V_SETS, false, V_FITTED>(values, slots, tile - keys_end, tokens, vectors, decoding, tile_y);
  else
    rotate_queries<Q_TERMS, Q_SETS>(queries, tile - values_end, tokens, decoding);
}
