// Store of a prompt's chunk: rotate, clip, quantize and pack its tokens into the cache, and rotate its queries.
//
// A block has a matrix in shared memory, split into 16-bit terms that together have float32 precision, and takes tiles of
// 64 vectors as long as there are any; each of its groups of four warps has tiles of its own, so that one multiplies while
// another quantizes or waits for memory. A tile stays in the registers in which the tensor cores leave it. Columns of the
// matrix are in an order in which a lane then has codes of bytes that lie side by side, and rows in one in which it reads
// 16 bytes of a vector: see cuda/prompt.py.
#include "prompt_codes.cuh"

constexpr bool X_BF16 = Q_BF16;  // keys, values and queries have one format
constexpr int K_TERMS = OSCAR_K_TERMS, V_TERMS = OSCAR_V_TERMS, Q_TERMS = OSCAR_Q_TERMS;  // 0: no rotation
constexpr int K_SETS = OSCAR_K_SETS, V_SETS = OSCAR_V_SETS, Q_SETS = OSCAR_Q_SETS;  // matrices: 1 or one per kv head
constexpr bool HAS_CENTER = OSCAR_HAS_CENTER;
constexpr bool K_FITTED = OSCAR_K_FITTED, V_FITTED = OSCAR_V_FITTED;  // see fitted_parameters in codec.py
constexpr int PROMPT_THREADS = OSCAR_PROMPT_THREADS, TEAMS = PROMPT_THREADS / 128;
constexpr int TERM_BYTES = HEAD_DIM * HEAD_DIM * 2;
static_assert(HEAD_DIM == 128, "sums of a tile are 64 registers");

struct Input {
  const u16* x;
  i64 token_stride, head_stride;
  const char* terms;  // [set][term], see cuda/prompt.py
  float unscale;      // of the terms
};

struct Side {
  Input input;
  const float* center;  // [KV_HEADS, HEAD_DIM]
  int rank;             // of the clip threshold among the magnitudes, 1 is the largest; 0: no clip
  float gain;           // of fitted scales
  u8* rows;
  u16 *ring, *sink, *copy;  // [tokens, KV_HEADS, HEAD_DIM], of a copy with heads of other parts between
};

struct Queries {
  Input input;
  u16* out;  // [tokens, Q_HEADS, HEAD_DIM]
};

struct Slots {
  const i64 *row, *ring, *sink, *copy;  // -1 in all but rows: not there; null where there are no copies
  int copy_heads;                       // from one token of a copy to the next
};

// 64 vectors of one matrix, of which a lane has parts of two.
template <int HEADS, int SETS>
struct Tile {
  int token[2], head[2];
  bool live[2];  // past the end the last vector there is

  DEVICE Tile(int set, int tile, int tokens) {
    constexpr int OF_SET = HEADS / SETS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int vector = tile * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i, last = tokens * OF_SET - 1;
      live[i] = vector <= last;
      vector = min(vector, last);
      token[i] = vector / OF_SET;
      head[i] = set * OF_SET + vector % OF_SET;
    }
  }
};

// Numbers of a tile, rotated.
template <int TERMS, int HEADS, int SETS>
DEVICE void rotate(float (&y)[64], const Input& input, const Tile<HEADS, SETS>& tile, u32 matrix) {
  uint4 x[2][4];  // channels 32 u + 8 (lane % 4) + 0..7
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u16* at = input.x + tile.token[i] * input.token_stride + tile.head[i] * input.head_stride + 8 * (threadIdx.x % 4);
#pragma unroll
    for (int u = 0; u < 4; u++) x[i][u] = *(const uint4*)(at + 32 * u);
  }
  if constexpr (TERMS > 0) {
    products_begin();
    // Small terms first.
#pragma unroll
    for (int term = TERMS - 1; term >= 0; term--)
#pragma unroll
      for (int u = 0; u < 4; u++) {
        uint4 a = x[0][u], b = x[1][u];
        u32 at = matrix + term * TERM_BYTES + u * (TERM_BYTES / 4);
        mma_wide<X_BF16>(y, a.x, b.x, a.y, b.y, at, term < TERMS - 1 || u > 0);
        mma_wide<X_BF16>(y, a.z, b.z, a.w, b.w, at + TERM_BYTES / 8, true);
      }
    products_end();
#pragma unroll
    for (int n = 0; n < 64; n++) y[n] *= input.unscale;
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int e = 0; e < 32; e += 2) {
        const uint4& eight = x[i][e / 8];
        u32 pair = e % 8 == 0 ? eight.x : e % 8 == 2 ? eight.y : e % 8 == 4 ? eight.z : eight.w;
        y[number(i, e)] = low_half<X_BF16>(pair), y[number(i, e + 1)] = high_half<X_BF16>(pair);
      }
  }
}

// Vector i, narrowed.
template <bool BF16>
DEVICE void write_vector(u16* to, const float (&y)[64], int i) {
#pragma unroll
  for (int u = 0; u < 4; u++) {
    u32 w[4];
#pragma unroll
    for (int n = 0; n < 4; n++) w[n] = pack_halves<BF16>(y[number(i, 8 * u + 2 * n)], y[number(i, 8 * u + 2 * n + 1)]);
    *(uint4*)(to + 32 * u + threadIdx.x % 4 * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

template <bool BF16>
DEVICE void store_window(u16* window, int slot, int heads, int head, const float (&y)[64], int i) {
  if (slot >= 0) write_vector<BF16>(window + ((i64)slot * heads + head) * HEAD_DIM, y, i);
}

// What a block works on: tiles of one matrix, which it has copied.
template <int HEADS, int SETS, int TERMS>
struct Share {
  int set, tile, tiles, step;
  u32 matrix;

  // ``blocks`` share the matrices evenly.
  DEVICE Share(const Input& input, int tokens, int block, int blocks, char* shared) {
    int own = blocks / SETS;
    set = block / own;
    tiles = (tokens * (HEADS / SETS) + 63) / 64;
    // A few tiles are spread over all blocks.
    tile = threadIdx.x / 128 * own + block - set * own;
    step = own * TEAMS;
    matrix = shared_address(shared);
    if constexpr (TERMS > 0) {
      u32 barrier = matrix + OSCAR_PROMPT_BYTES - 16;
      if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
        barrier_arrive_expect(barrier, TERMS * TERM_BYTES);
        for (int n = 0; n < TERMS; n++)
          bulk_copy(matrix + n * TERM_BYTES, input.terms + (i64)(set * TERMS + n) * TERM_BYTES, TERM_BYTES, barrier);
      }
      __syncthreads();
      barrier_wait(barrier, 0);
    }
    wait_for_predecessor();
  }
};

template <class Rows, int TERMS, int SETS, bool CENTER, bool FITTED>
DEVICE void store_side(const Side& side, const Slots& slots, int tokens, int block, int blocks, char* shared) {
  Share<KV_HEADS, SETS, TERMS> share(side.input, tokens, block, blocks, shared);
#pragma unroll 1
  for (int n = share.tile; n < share.tiles; n += share.step) {
    Tile<KV_HEADS, SETS> tile(share.set, n, tokens);
    int row[2], ring[2], sink[2], copy[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      auto slot = [&](bool any, const i64* of) { return any && tile.live[i] ? (int)of[tile.token[i]] : -1; };
      row[i] = (int)slots.row[tile.token[i]];
      ring[i] = slot(RING > 0, slots.ring), sink[i] = slot(SINK > 0, slots.sink), copy[i] = slot(slots.copy, slots.copy);
    }
    float y[64];
    rotate<TERMS>(y, side.input, tile, share.matrix);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (CENTER) {
        const float* center = side.center + tile.head[i] * HEAD_DIM + threadIdx.x % 4 * 8;
#pragma unroll
        for (int e = 0; e < 32; e += 4) {
          float4 four = load_again4(center + e / 8 * 32 + e % 8);
          y[number(i, e)] -= four.x, y[number(i, e + 1)] -= four.y;
          y[number(i, e + 2)] -= four.z, y[number(i, e + 3)] -= four.w;
        }
      }
      if (RING > 0) store_window<WINDOW_BF16>(side.ring, ring[i], KV_HEADS, tile.head[i], y, i);
      if (SINK > 0) store_window<WINDOW_BF16>(side.sink, sink[i], KV_HEADS, tile.head[i], y, i);
      store_window<X_BF16>(side.copy, copy[i], slots.copy_heads, tile.head[i], y, i);
    }
    Extremes<Rows::GROUPS> of(y);
    float threshold[2] = {as_float(0x7f800000u), as_float(0x7f800000u)};
    if (side.rank > 0) {
      threshold[0] = of.largest[0], threshold[1] = of.largest[1];
      find_thresholds<TERMS == 0 && !CENTER>(y, threshold, side.rank);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      quantize_vector<FITTED, Rows>(y, i, of, threshold[i], side.gain, side.rows + (i64)row[i] * Rows::ROW_BYTES,
                                    tile.head[i], tile.live[i]);
  }
}

DEVICE void rotate_queries(const Queries& queries, int tokens, int block, int blocks, char* shared) {
  Share<Q_HEADS, Q_SETS, Q_TERMS> share(queries.input, tokens, block, blocks, shared);
#pragma unroll 1
  for (int n = share.tile; n < share.tiles; n += share.step) {
    Tile<Q_HEADS, Q_SETS> tile(share.set, n, tokens);
    float y[64];
    rotate<Q_TERMS>(y, queries.input, tile, share.matrix);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (tile.live[i])
        write_vector<X_BF16>(queries.out + ((i64)tile.token[i] * Q_HEADS + tile.head[i]) * HEAD_DIM, y, i);
  }
}

// Grid: blocks of keys, of values, and of queries.
extern "C" __global__ void __launch_bounds__(PROMPT_THREADS, 1) oscar_prompt(
    Side keys, Side values, Queries queries, Slots slots, int tokens, int key_blocks, int value_blocks) {
  extern __shared__ __align__(128) char shared[];
  int block = blockIdx.x, others = key_blocks + value_blocks;
  if (block < key_blocks)
    store_side<KeyRows, K_TERMS, K_SETS, HAS_CENTER, K_FITTED>(keys, slots, tokens, block, key_blocks, shared);
  else if (block < others)
    store_side<ValueRows, V_TERMS, V_SETS, false, V_FITTED>(values, slots, tokens, block - key_blocks, value_blocks, shared);
  else
    rotate_queries(queries, tokens, block - others, gridDim.x - others, shared);
}
