// What a kernel is compiled for. Every OSCAR_ macro is given to the compiler by variant.py and, for the store, store.py.
#pragma once

#include "ptx.cuh"

constexpr int KV_HEADS = OSCAR_KV_HEADS;
constexpr int GQA = OSCAR_GQA;            // query heads per kv head
constexpr int HEAD_DIM = OSCAR_HEAD_DIM;  // 64, 128 or 256
constexpr int SCALE_BYTES = OSCAR_SCALE_BYTES;  // 2 or 4
constexpr bool SCALE_BF16 = OSCAR_SCALE_BF16;   // of 2 bytes: bfloat16, else float16
constexpr bool Q_BF16 = OSCAR_Q_BF16;           // queries and output: bfloat16, else float16
constexpr bool WINDOW_BF16 = OSCAR_WINDOW_BF16;
constexpr bool WRITES_LSE = OSCAR_LSE;
constexpr int PAGE = OSCAR_PAGE;  // tokens
constexpr int SINK = OSCAR_SINK;
constexpr int RECENT = OSCAR_RECENT;
constexpr int RING = OSCAR_RING;
constexpr int DRAFTS = OSCAR_DRAFTS;    // new tokens of a request in verification, which its length does not count; 0 in decode
constexpr int QUERIES = OSCAR_QUERIES;  // of them that are worked on at once; 1 in decode
constexpr int READING_TERMS = OSCAR_READING_TERMS;  // of the matrix that outputs are multiplied by; 0: they are not
constexpr int READING_SETS = OSCAR_READING_SETS;    // such matrices: 1 or one per kv head
constexpr bool MULTIPLIES = READING_TERMS > 0;
constexpr bool WARPGROUPS = OSCAR_WARPGROUPS;  // four warps multiply side by side: verify.cu, else decode.cu
constexpr int MAX_WARPS = OSCAR_MATH_WARPS;
constexpr int MAX_BATCH = 1024;
constexpr int SHARED_LIMIT = 227 * 1024;  // of a block on compute capability 9.0

constexpr int Q_HEADS = KV_HEADS * GQA;
// What reads a request's keys and values together: query heads of a kv head, of one token after the other. More tokens than
// that take several passes, which are planned like requests of their own.
constexpr int COLUMNS = GQA * QUERIES;  // of a kv head
constexpr int ROWS = KV_HEADS * COLUMNS;
constexpr int PASSES = DRAFTS == 0 ? 1 : (DRAFTS + QUERIES - 1) / QUERIES;

enum Coding { AFFINE, SYMMETRIC, CODEBOOK };  // of layout.py, in the order of variant.py

// Rows of keys or of values, see layout.py.
template <Coding CODING_, int BITS_, int GROUP_>
struct Rows {
  static constexpr Coding CODING = CODING_;
  static constexpr int BITS = BITS_;    // of a code: 2, 3 or 4
  static constexpr int GROUP = GROUP_;  // channels that share a scale and a zero point
  static constexpr int GROUPS = HEAD_DIM / GROUP;
  static constexpr int PLANES = BITS == 4 ? 2 : 4;     // codes at the same bits of a head's bytes; of three bits the low two
  static constexpr int WIDTH = HEAD_DIM / PLANES;      // channels of a plane, and bytes of all of them
  static constexpr int PLANE_BITS = BITS == 4 ? 4 : 2; // from one plane to the next
  static constexpr bool NARROW = WIDTH < 32;           // else a head has spans of 32 bytes
  static constexpr int SPANS = NARROW ? 1 : WIDTH / 32;
  static constexpr int CODE_BYTES = HEAD_DIM * BITS / 8;  // of one head in a row
  static constexpr bool HAS_ZERO = CODING == AFFINE;  // else the zero point is a constant
  static constexpr float ZERO = ((1 << BITS) - 1) / 2.0f;
  static constexpr int GROUP_BYTES = (HAS_ZERO ? 2 : 1) * SCALE_BYTES;  // of a group's scale and zero point
  static constexpr int PARAM_BYTES = GROUPS * GROUP_BYTES;
  static constexpr int PARAMS_OFFSET = KV_HEADS * CODE_BYTES;
  static constexpr int ROW_BYTES = KV_HEADS * (CODE_BYTES + PARAM_BYTES);

  // What a code at the bits of a plane is multiplied by, as unpacked by code() below.
  static constexpr int weight(int plane) { return BITS == 3 && plane == 3 ? 16 : 1 << (PLANE_BITS * plane); }
  // Channel at byte ``b`` of a plane, and its group.
  static constexpr int channel(int plane, int b) { return plane * WIDTH + b; }
  static constexpr int group(int plane, int b) { return channel(plane, b) / GROUP; }
};
using KeyRows = Rows<(Coding)OSCAR_K_CODING, OSCAR_K_BITS, OSCAR_K_GROUP>;
using ValueRows = Rows<(Coding)OSCAR_V_CODING, OSCAR_V_BITS, OSCAR_V_GROUP>;
constexpr bool HAS_BOOK = KeyRows::CODING == CODEBOOK;
constexpr bool SHARED_BOOK = HAS_BOOK && OSCAR_SHARED_BOOK;  // by all kv heads and groups
constexpr int K_GROUPS = KeyRows::GROUPS, V_GROUPS = ValueRows::GROUPS;

// Blocks that work on this cache: all of the launch, or in that of decode_pair.cu the first of it, or the others. Unsigned or
// not as each was measured.
#if OSCAR_PART == 1
DEVICE int own_block() { return (int)blockIdx.x; }
DEVICE int own_blocks() { return first_blocks(); }
#elif OSCAR_PART == 2
DEVICE int own_block() { return (int)(blockIdx.x - first_blocks()); }
DEVICE int own_blocks() { return (int)(gridDim.x - first_blocks()); }
#else
DEVICE u32 own_block() { return blockIdx.x; }
DEVICE u32 own_blocks() { return gridDim.x; }
#endif

template <bool FIRST, class One, class Other>
struct Either {
  using type = One;
};
template <class One, class Other>
struct Either<false, One, Other> {
  using type = Other;
};

constexpr int largest_power_of_two(int n) { return n < 2 ? 1 : 2 * largest_power_of_two(n / 2); }
constexpr int minimum(int a, int b) { return a < b ? a : b; }
constexpr int maximum(int a, int b) { return a < b ? b : a; }

// A warp works on one kv head and on TILE tokens of history at a time; TILES_PER_STAGE warps share a head.
constexpr int TILE = WARPGROUPS ? 16 : 32;
constexpr int TILES_PER_STAGE = largest_power_of_two(MAX_WARPS / KV_HEADS);
constexpr int MATH_WARPS = KV_HEADS * TILES_PER_STAGE;
// One more warp issues copies. Eight or sixteen math warps want more registers than an even share, and registers change
// hands in groups of four warps only: then the copying warp gets three idle companions, which give theirs away too.
constexpr bool REGISTERS_MOVE = MATH_WARPS == 8 || MATH_WARPS == 16;
constexpr int THREADS = (MATH_WARPS + (REGISTERS_MOVE ? 4 : 1)) * 32;
// A block gets 168 registers a thread for 12 warps, 96 for 20; what is taken must have been given, or the block stands still.
constexpr int COPY_REGISTERS = 24;
constexpr int MATH_REGISTERS = MATH_WARPS == 8 ? 240 : 112;
static_assert(!REGISTERS_MOVE || MATH_WARPS * MATH_REGISTERS + 4 * COPY_REGISTERS <= (MATH_WARPS + 4) * (MATH_WARPS == 8 ? 168 : 96),
              "more registers than the block has");
constexpr int STAGE_TOKENS = TILE * TILES_PER_STAGE;
constexpr int COPY_TOKENS = minimum(PAGE, STAGE_TOKENS);
constexpr int COPIES = STAGE_TOKENS / COPY_TOKENS;
constexpr int KEY_BYTES = (STAGE_TOKENS * KeyRows::ROW_BYTES + 127) / 128 * 128;  // of a stage; its values follow
constexpr int VALUE_BYTES = (STAGE_TOKENS * ValueRows::ROW_BYTES + 127) / 128 * 128;
constexpr int STAGE_BYTES = KEY_BYTES + VALUE_BYTES;

constexpr int WINDOW_ROW = KV_HEADS * HEAD_DIM * 2;  // bytes of one token's keys, or values, in a window
constexpr int WINDOW_BYTES = STAGE_BYTES / 2 / 128 * 128;  // of a stage that holds keys, or values, of a window
constexpr int WINDOW_FIT = WINDOW_BYTES / WINDOW_ROW;
constexpr int WINDOW_TILE = 8;  // window tokens that a warp works on at a time
constexpr int WINDOW_TOKENS = WINDOW_FIT >= WINDOW_TILE ? WINDOW_FIT / WINDOW_TILE * WINDOW_TILE : WINDOW_FIT;
constexpr int WINDOW_TILES = (WINDOW_TOKENS + WINDOW_TILE - 1) / WINDOW_TILE;

// Columns of the tensor-core products with queries: high and low part of each query head, four heads to a block.
constexpr int QK_BLOCKS = (COLUMNS + 3) / 4;
// Up to four heads use the eight columns of the product with values as (head, half of the tokens).
constexpr bool PAIRED = COLUMNS <= 4;
constexpr int PV_BLOCKS = PAIRED ? 1 : (COLUMNS + 7) / 8;
constexpr int PRODUCT_COLUMNS = 32;  // of WARPGROUPS: columns beyond a pass's are zero
constexpr int SPILL_WORDS = WARPGROUPS ? PRODUCT_COLUMNS / 2 * ValueRows::PLANES + PRODUCT_COLUMNS / 4 + 1  // of a lane
                            : PAIRED   ? 0 : PV_BLOCKS * (HEAD_DIM / 16) * 4 + QK_BLOCKS + 1;
constexpr int UNITS = HEAD_DIM / 32;       // products of 32 channels
constexpr int TILES_M = HEAD_DIM / 16;     // products of 16 output channels
// More columns of queries than a lane has registers for beside its sums: the warps of a kv head read them from shared memory.
constexpr bool WIDE = HEAD_DIM * COLUMNS > 2048;

// Shared memory: what the warps of a head exchange, queries, the plan, barriers, codebooks, and stages.
constexpr int PARTIAL_ROW = HEAD_DIM + 4;  // of a head: outputs, maximum and total, padded to 16 bytes
constexpr int EXCHANGED = HAS_BOOK && !SHARED_BOOK ? 1 : 4;  // query heads at a time: books leave no memory for more
constexpr int PARTIAL_FLOATS = EXCHANGED * PARTIAL_ROW;
constexpr int TEAM_BYTES = 7 * 128;  // of a kv head, see Team
constexpr int EXCHANGE_BYTES = KV_HEADS * (WARPGROUPS ? TEAM_BYTES : (TILES_PER_STAGE / 2) * PARTIAL_FLOATS * 4);
constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 2;
constexpr int MOST_COLUMNS = WARPGROUPS ? PRODUCT_COLUMNS : 16;
constexpr int VISIBLE_BYTES = DRAFTS > 0 ? MOST_COLUMNS * 8 : 0;  // behind queries: which new tokens each of theirs sees
constexpr int QUERY_BUFFERS = WARPGROUPS ? 1 : 2;  // of this and the next segment, where memory suffices
constexpr int QUERIES_OFFSET = (EXCHANGE_BYTES + 127) / 128 * 128;
constexpr int DIGITS_OFFSET = QUERIES_OFFSET + QUERY_BUFFERS * (QUERY_BYTES + VISIBLE_BYTES);
constexpr int WEIGHT_BYTES = V_GROUPS * STAGE_TOKENS * PRODUCT_COLUMNS * 2;  // of a stage, of WARPGROUPS
constexpr int COLUMN_BYTES = PRODUCT_COLUMNS * HEAD_DIM * 2;                 // of queries, as WARPGROUPS multiply by them
constexpr int DIGIT_BYTES = WARPGROUPS ? COLUMN_BYTES + 2 * WEIGHT_BYTES     // of a kv head
                            : WIDE     ? QK_BLOCKS * UNITS * 32 * 8 : 0;
constexpr int PLAN_OFFSET = DIGITS_OFFSET + KV_HEADS * DIGIT_BYTES;
constexpr int MOST_WARPS = 20;  // of a block: 16 and four that copy
constexpr int PLAN_BYTES = 10 * MAX_BATCH + 4 * MOST_WARPS;
constexpr int BARRIERS_OFFSET = PLAN_OFFSET + PLAN_BYTES;
constexpr int BOOKS_OFFSET = (BARRIERS_OFFSET + (16 + 2 + HAS_BOOK) * 16 + 127) / 128 * 128;
constexpr int POINT_BYTES = SHARED_BOOK ? 32 * 256 * 4 : HEAD_DIM * 256;  // of all kv heads' codebook, or of one's
constexpr int FACTORS_OFFSET = (SHARED_BOOK ? 1 : KV_HEADS) * POINT_BYTES;  // from the points: a float for four channels
constexpr int BOOK_BYTES = HAS_BOOK ? FACTORS_OFFSET + KV_HEADS * HEAD_DIM : 0;
constexpr int STAGES_OFFSET = BOOKS_OFFSET + (BOOK_BYTES + 127) / 128 * 128;
// Three stages, or as many small ones as hide the latency of memory. More is slower: all copies of the card would wait in
// a longer queue, the queries and whatever a block that starts late asks for behind them.
constexpr int ENOUGH_BYTES = 112 * 1024;
constexpr int FITTING_STAGES = (SHARED_LIMIT - STAGES_OFFSET) / STAGE_BYTES;
constexpr int STAGES = minimum(minimum(FITTING_STAGES, maximum(ENOUGH_BYTES / STAGE_BYTES, 3)), 16);
constexpr int SHARED_BYTES = STAGES_OFFSET + STAGES * STAGE_BYTES;

static_assert(KV_HEADS <= MAX_WARPS, "one warp per kv head");
static_assert(COLUMNS <= MOST_COLUMNS, "query heads that a warp has columns for");
static_assert(DRAFTS == 0 ? QUERIES == 1 : RING >= RECENT + DRAFTS, "new tokens lie in the ring beside the recent window");
static_assert(PAGE % TILE == 0, "a tile must not cross a page");
static_assert(WINDOW_TOKENS > 0, "a window token must fit a stage");
static_assert(STAGES >= 2, "copies must run ahead of arithmetic");
static_assert(THREADS == OSCAR_THREADS && SHARED_BYTES == OSCAR_SHARED_BYTES &&
              SPILL_WORDS * 32 * MATH_WARPS == OSCAR_SPILL_FLOATS, "variant.py says something else");
