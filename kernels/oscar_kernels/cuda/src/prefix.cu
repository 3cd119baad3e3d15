// Cached prefixes as 16-bit keys and values, in the basis of the cache: what an attention kernel that reads no codes takes.
//
// A warp has consecutive rows of the output. Its lanes find out where each of them lies, in the history pool, the sink store
// or the ring. Then a lane takes eight bytes of a head at a time, which are eight neighbouring channels of every plane, so
// that it writes 16 bytes at a time; it asks for two such pieces before it writes the first. Codes of two or three bits
// stand for few numbers: those of a group are made once, and bytes are chosen from them.
#include "plan.cuh"

constexpr int PREFIX_THREADS = OSCAR_PREFIX_THREADS, PREFIX_ROWS = OSCAR_PREFIX_ROWS;  // of a block, of a warp
constexpr int AT_ONCE = 2;  // pieces of a lane
static_assert(PREFIX_ROWS <= 32, "a lane for every row");

struct Side {
  const u8* rows;
  const u16 *sink, *ring;  // [tokens, KV_HEADS, HEAD_DIM]
  u16* out;                // [rows, heads, HEAD_DIM], this cache's heads the first
};

// Positions that lie one after the other in the output, a run of each request.
struct Spans {
  const int *request, *begin;  // first position
  const int *indptr;           // [count + 1], first row of each in the output
  int count;
};

// Where a row comes from.
struct Source {
  enum { NOWHERE, HISTORY, IN_SINK, IN_RING };
  int place, slot;

  DEVICE Source from_lane(int lane) const {
    return {__shfl_sync(FULL_WARP, place, lane), __shfl_sync(FULL_WARP, slot, lane)};
  }
};

// Spans that end at ``row`` or before it; called by whole warps.
DEVICE int spans_before(int row, const Spans& spans) {
  for (int first = 0; first < spans.count; first += 32) {
    int span = first + threadIdx.x % 32;
    int ended = __popc(__ballot_sync(FULL_WARP, span < spans.count && spans.indptr[span + 1] <= row));
    if (ended < 32) return first + ended;
  }
  return spans.count;
}

// Of a row behind the end of ``span`` or within it.
DEVICE Source source_of(int row, int span, const Spans& spans, const Tables& tables) {
  while (span < spans.count && spans.indptr[span + 1] <= row) span++;
  if (span >= spans.count) return {Source::NOWHERE, 0};
  int request = spans.request[span], position = spans.begin[span] + row - spans.indptr[span];
  int kv_len = tables.kv_lens[request];
  if (position >= kv_len) return {Source::NOWHERE, 0};
  Borders borders = borders_from(kv_len, tables.ring_start[request]);
  if (SINK > 0 && position < borders.sink_end) return {Source::IN_SINK, tables.sink_block[request] * SINK + position};
  if (RING > 0 && position >= borders.ring_begin)
    return {Source::IN_RING, tables.ring_row[request] * RING + position % maximum(RING, 1)};
  int page = tables.page_table[(i64)request * tables.page_stride + position / PAGE];
  return {Source::HISTORY, page * PAGE + position % PAGE};
}

template <bool FINITE>
DEVICE u32 pack(float x, float y) {
  float infinity = as_float(0x7f800000u);
  if (FINITE) x = fabsf(x) < infinity ? x : 0, y = fabsf(y) < infinity ? y : 0;
  return pack_halves<Q_BF16>(x, y);
}

// Of a row in memory, which begins at a multiple of the largest power of two in its size.
template <class Rows>
DEVICE u32 word_at(const u8* at) {
  if (Rows::ROW_BYTES % 4 == 0) return *(const u32*)at;
  return *(const u16*)at | *(const u16*)(at + 2) << 16;
}

template <class Rows>
DEVICE float2 params_at(const u8* at) {
  if (SCALE_BYTES == 4) return make_float2(*(const float*)at, Rows::HAS_ZERO ? *(const float*)(at + 4) : Rows::ZERO);
  float scale = low_half<SCALE_BF16>(*(const u16*)at);
  return make_float2(scale, Rows::HAS_ZERO ? low_half<SCALE_BF16>(*(const u16*)(at + 2)) : Rows::ZERO);
}

// The numbers of a group, by code.
template <int BITS, bool FINITE>
struct Numbers {
  u32 pairs[1 << (BITS - 1)];

  DEVICE void make(float2 params) {
#pragma unroll
    for (int i = 0; i < 1 << (BITS - 1); i++)
      pairs[i] = pack<FINITE>(params.x * (2 * i - params.y), params.x * (2 * i + 1 - params.y));
  }

  // Those of four codes in the bytes of ``codes``; of three bits the highest is in ``high``.
  DEVICE uint2 choose(u32 codes, u32 high) const {
    u32 which = codes * 0x22u + 0x10101010u, of[2];  // a number's bytes are 2 code and 2 code + 1
#pragma unroll
    for (int i = 0; i < 2; i++) {
      of[i] = choose_bytes(pairs[0], pairs[1], which >> 16 * i);
      if constexpr (BITS == 3) {
        u32 upper = choose_bytes(pairs[2], pairs[3], which >> 16 * i);
        u32 mask = choose_bytes(high * 0xffu, 0, i == 0 ? 0x1100 : 0x3322);
        of[i] = (upper & mask) | (of[i] & ~mask);
      }
    }
    return make_uint2(of[0], of[1]);
  }
};

// Four bits have more numbers than are worth making.
template <bool FINITE>
struct Numbers<4, FINITE> {
  float2 params;

  DEVICE void make(float2 of) { params = of; }

  DEVICE uint2 choose(u32 codes, u32) const {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)  // a code below 2^23 in the last bits of 2^23
      x[i] = params.x * (as_float(0x4b000000u | (codes >> 8 * i & 0xffu)) - 8388608.0f - params.y);
    return make_uint2(pack<FINITE>(x[0], x[1]), pack<FINITE>(x[2], x[3]));
  }
};

// Eight bytes of a head: channels 8 ``piece`` to 8 ``piece`` + 7 of every plane.
template <class Rows, bool FINITE>
struct Piece {
  static constexpr int PLANES = Rows::PLANES, WIDTH = Rows::WIDTH, COUNT = WIDTH / 8;  // of a head
  static constexpr int group(int plane) { return plane * WIDTH / Rows::GROUP; }  // the first of a plane

  int place;
  u16* out;
  u32 low[2], high;
  float2 params[PLANES];
  uint4 window[PLANES];

  DEVICE void load(const Side& side, Source source, int row, int heads, int head, int piece) {
    place = source.place;
    out = side.out + ((i64)row * heads + head) * HEAD_DIM + 8 * piece;
    if (place == Source::HISTORY) {
      const u8* at = side.rows + (i64)source.slot * Rows::ROW_BYTES;
      const u8* codes = at + head * Rows::CODE_BYTES;
      low[0] = word_at<Rows>(codes + 8 * piece), low[1] = word_at<Rows>(codes + 8 * piece + 4);
      high = Rows::BITS == 3 ? word_at<Rows>(codes + WIDTH + 4 * piece) : 0;
      at += Rows::PARAMS_OFFSET + head * Rows::PARAM_BYTES;
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++)
        params[plane] = params_at<Rows>(at + (group(plane) + (Rows::GROUP < WIDTH ? 8 * piece / Rows::GROUP : 0)) * Rows::GROUP_BYTES);
    } else if (place != Source::NOWHERE) {
      const u16* from = place == Source::IN_SINK ? side.sink : side.ring;
      from += ((i64)source.slot * KV_HEADS + head) * HEAD_DIM + 8 * piece;
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) window[plane] = *(const uint4*)(from + plane * WIDTH);
    }
  }

  DEVICE void store() const {
    if (place == Source::HISTORY) {
      Numbers<Rows::BITS, FINITE> numbers;
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) {
        if (plane == 0 || group(plane) != group(plane - 1)) numbers.make(params[plane]);
        constexpr u32 MASK = 0x01010101u * (Rows::BITS == 4 ? 15 : 3);
        uint2 of[2];
#pragma unroll
        for (int i = 0; i < 2; i++)  // of layout.HIGH_BITS
          of[i] = numbers.choose(low[i] >> Rows::PLANE_BITS * plane & MASK, high >> (2 * plane + 2) % 8 + i & 0x01010101u);
        *(uint4*)(out + plane * WIDTH) = make_uint4(of[0].x, of[0].y, of[1].x, of[1].y);
      }
    } else if (place != Source::NOWHERE) {
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) {
        uint4 x = window[plane];
        *(uint4*)(out + plane * WIDTH) = make_uint4(converted(x.x), converted(x.y), converted(x.z), converted(x.w));
      }
    }
  }

  static DEVICE u32 converted(u32 word) {
    return !FINITE && WINDOW_BF16 == Q_BF16 ? word : pack<FINITE>(low_half<WINDOW_BF16>(word), high_half<WINDOW_BF16>(word));
  }
};

// A warp's rows. FINITE: what is no number becomes 0. A tile of keys may reach into the next request's; there weights are 0,
// but 0 x NaN is NaN.
template <class Rows, bool FINITE>
DEVICE void copy_side(const Side& side, Source source, int begin, int heads) {
  using Own = Piece<Rows, FINITE>;
  constexpr int OF_ROW = KV_HEADS * Own::COUNT, PIECES = PREFIX_ROWS * OF_ROW;
  for (int first = 0; first < PIECES; first += AT_ONCE * 32) {
    Own pieces[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      int index = first + 32 * n + threadIdx.x % 32, row = index / OF_ROW;
      Source from = source.from_lane(min(row, 31));
      if (index >= PIECES) from.place = Source::NOWHERE;
      pieces[n].load(side, from, begin + row, heads, index / Own::COUNT % KV_HEADS, index % Own::COUNT);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) pieces[n].store();
  }
}

// Grid: for as many rows as a block's warps have a block for keys and one for values.
extern "C" __global__ void __launch_bounds__(PREFIX_THREADS) oscar_prefix(
    Side keys, Side values, Spans spans, Tables tables, int rows, int heads) {
  int begin = (blockIdx.x / 2 * (PREFIX_THREADS / 32) + threadIdx.x / 32) * PREFIX_ROWS;
  wait_for_predecessor();
  if (begin >= rows) return;
  int span = spans_before(begin, spans), row = begin + threadIdx.x % 32;
  Source source = {Source::NOWHERE, 0};
  if (threadIdx.x % 32 < PREFIX_ROWS && row < rows) source = source_of(row, span, spans, tables);
  if (blockIdx.x % 2 == 0) copy_side<KeyRows, false>(keys, source, begin, heads);
  else copy_side<ValueRows, true>(values, source, begin, heads);
}
