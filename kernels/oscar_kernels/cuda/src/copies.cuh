// The warp that keeps shared memory full: bulk copies of whole pages of history and of window rows, some stages ahead of
// the arithmetic.
#pragma once

#include "plan.cuh"

struct Buffers {
  const u8 *k_rows, *v_rows;  // [slots, KeyRows::ROW_BYTES], [slots, ValueRows::ROW_BYTES]
  const u8 *k_sink, *v_sink;  // [blocks, SINK, WINDOW_ROW]
  const u8 *k_ring, *v_ring;  // [rows, RING, WINDOW_ROW]
};

// Stages that are copied before this launch knows its queries. More would keep the queries waiting: a multiprocessor's
// copies are served in order.
constexpr int STAGES_BEFORE_QUERY = 1;
constexpr int ALL_STAGES = 1 << 20;

// Position in the ring of stages: which stage, and the parity that its barriers wait for.
struct Turn {
  int stage = 0;
  u32 parity = 0;

  DEVICE void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

DEVICE u32 stage_address(u32 shared, int stage) { return shared + STAGES_OFFSET + stage * STAGE_BYTES; }
DEVICE u32 full_barrier(u32 shared, int stage) { return shared + BARRIERS_OFFSET + stage * 16; }
DEVICE u32 empty_barrier(u32 shared, int stage) { return full_barrier(shared, stage) + 8; }
// Queries of segments take turns in QUERY_BUFFERS places, each with barriers like a stage.
DEVICE u32 query_address(u32 shared, int segment) { return shared + QUERIES_OFFSET + segment % QUERY_BUFFERS * (QUERY_BYTES + VISIBLE_BYTES); }
DEVICE u32 query_full(u32 shared, int segment) { return full_barrier(shared, 16 + segment % QUERY_BUFFERS); }
DEVICE u32 query_empty(u32 shared, int segment) { return empty_barrier(shared, 16 + segment % QUERY_BUFFERS); }
DEVICE u32 query_parity(int segment) { return segment / QUERY_BUFFERS % 2; }

struct Query {
  const u16* q;  // rotated, [batch, Q_HEADS, HEAD_DIM], in verification [batch * DRAFTS, Q_HEADS, HEAD_DIM]
  i64 token_stride, head_stride;
  float sm_scale;
  const u64* visible;  // [batch, DRAFTS], bit j: the token sees new token j
};

// Several tokens' queries, kv head after kv head, and what the tokens see.
DEVICE void copy_queries(const Query& query, int pass, u64 visible, u32 full, u32 destination) {
  int lane = threadIdx.x % 32, first = pass_request(pass) * DRAFTS + pass_token(pass);
  if (lane < QUERIES) store_shared2(destination + QUERY_BYTES + 8 * lane, (u32)visible, (u32)(visible >> 32));
  __syncwarp();
  if (lane == 0) barrier_arrive_expect(full, QUERY_BYTES);
  __syncwarp();
  bool whole = query.head_stride == HEAD_DIM;
  int size = whole ? GQA : 1;  // heads of a copy
  for (int at = lane * size; at < ROWS; at += 32 * size) {
    int token = at / GQA % QUERIES, head = at / COLUMNS * GQA + at % GQA;
    bulk_copy(destination + at * HEAD_DIM * 2,
              query.q + (first + token) * query.token_stride + head * query.head_stride, size * HEAD_DIM * 2, full);
  }
}

// ``number``: of the segment in this block.
DEVICE void copy_query(const Query& query, int request, u64 visible, int number, u32 shared) {
  barrier_wait(query_empty(shared, number), query_parity(number) ^ 1);
  if (DRAFTS > 0) {
    copy_queries(query, request, visible, query_full(shared, number), query_address(shared, number));
  } else if (threadIdx.x % 32 == 0) {
    u32 full = query_full(shared, number), destination = query_address(shared, number);
    barrier_arrive_expect(full, QUERY_BYTES);
    const u16* source = query.q + request * query.token_stride;
    bool whole = query.head_stride == HEAD_DIM;
    for (int head = 0; head < (whole ? 1 : Q_HEADS); head++)
      bulk_copy(destination + head * HEAD_DIM * 2, source + head * query.head_stride,
                whole ? QUERY_BYTES : HEAD_DIM * 2, full);
  }
  __syncwarp();
}

// What the copying warp has to know of a segment's request, asked for one segment ahead.
struct Ahead {
  int page;  // of copy 32 k + lane, of the segment's first copies
  int sink_block, ring_row;
  u64 visible;  // of the segment's token ``lane``

  DEVICE void load(const Segment& segment, const Tables& tables, const Query& query);
};

// The first slot of a copy in units of COPY_TOKENS, or -1 where the segment does not need it.
DEVICE int slot_of(const Segment& segment, const Tables& tables, int copy) {
  int begin = segment.borders.sink_end / COPY_TOKENS;
  int end = min((segment.borders.ring_begin + COPY_TOKENS - 1) / COPY_TOKENS,  // copies that have a page
                (segment.borders.first_stage() + segment.history_end) * COPIES);
  if (copy < begin || copy >= end) return -1;
  const int* pages = tables.page_table + (i64)pass_request(segment.request) * tables.page_stride;
  return pages[copy * COPY_TOKENS / PAGE] * (PAGE / COPY_TOKENS) + copy % (PAGE / COPY_TOKENS);
}

DEVICE int first_copy(const Segment& segment) {
  return (segment.borders.first_stage() + segment.history_begin) * COPIES;
}

DEVICE void Ahead::load(const Segment& segment, const Tables& tables, const Query& query) {
  int request = pass_request(segment.request), lane = threadIdx.x % 32;
  page = slot_of(segment, tables, first_copy(segment) + lane);
  sink_block = SINK > 0 ? tables.sink_block[request] : 0;
  ring_row = RING > 0 ? tables.ring_row[request] : 0;
  visible = lane < QUERIES && DRAFTS > 0 ? query.visible[request * DRAFTS + pass_token(segment.request) + lane] : 0;
}

// Read-after-write hazard: whether the launch before this one, which stores the newest token of every request, may still
// be writing a stage.
DEVICE bool may_be_written(const Segment& segment, int stage) {
  return RECENT == 0 && stage == segment.borders.history_stages() - 1;
}

// The history of a segment, stage by stage.
struct History {
  const Segment& segment;
  const Tables& tables;
  int first, copy;  // in units of COPY_TOKENS: of the segment, and the next one
  int mine, next;   // page numbers come 32 at a time, and those of the next round are asked for before they are needed

  DEVICE History(const Segment& segment, const Tables& tables, const Ahead& ahead)
      : segment(segment), tables(tables), first(first_copy(segment)), copy(first), mine(0), next(ahead.page) {}

  // Up to ``stages`` of them.
  DEVICE void copy_stages(int stages, const Buffers& buffers, u32 shared, Turn& turn) {
    int lane = threadIdx.x % 32;
    int end = min((segment.borders.first_stage() + segment.history_end) * COPIES, copy + stages * COPIES);
    u64 policy = read_once_policy();
    for (; copy < end; copy += COPIES) {
      int at = (copy - first) % 32;
      if (at == 0) {
        mine = next;
        next = slot_of(segment, tables, copy + 32 + lane);
      }
      int slot = __shfl_sync(FULL_WARP, mine, (at + lane) % 32);
      bool live = lane < COPIES && slot >= 0;
      u32 count = __popc(__ballot_sync(FULL_WARP, live));
      barrier_wait(empty_barrier(shared, turn.stage), turn.parity ^ 1);
      u32 full = full_barrier(shared, turn.stage);
      constexpr u32 KEYS = COPY_TOKENS * KeyRows::ROW_BYTES, VALUES = COPY_TOKENS * ValueRows::ROW_BYTES;
      if (lane == 0) barrier_arrive_expect(full, count * (KEYS + VALUES));
      __syncwarp();
      if (live) {
        u32 destination = stage_address(shared, turn.stage);
        bulk_copy_once(destination + lane * KEYS, buffers.k_rows + (i64)slot * KEYS, KEYS, full, policy);
        bulk_copy_once(destination + KEY_BYTES + lane * VALUES, buffers.v_rows + (i64)slot * VALUES, VALUES, full, policy);
      }
      turn.advance();
    }
  }
};

DEVICE void copy_window(
    const Segment& segment, const Buffers& buffers, const Ahead& ahead, u32 shared, Turn& turn) {
  const Borders& borders = segment.borders;
  i64 sink_row = (i64)ahead.sink_block * SINK;
  i64 ring_row = (i64)ahead.ring_row * RING;
  int tokens = borders.window_tokens();
  u64 policy = read_once_policy();
  for (int stage = segment.window_begin; stage < segment.window_end; stage++) {
    int token = stage * WINDOW_TOKENS, end = min(token + WINDOW_TOKENS, tokens);
    barrier_wait(empty_barrier(shared, turn.stage), turn.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      u32 full = full_barrier(shared, turn.stage), destination = stage_address(shared, turn.stage);
      barrier_arrive_expect(full, (end - token) * 2 * WINDOW_ROW);
      while (token < end) {  // what lies side by side in one copy: it ends with the sinks, and where the ring wraps around
        bool sink = token < borders.sink_end;
        int row = sink ? token : (borders.ring_begin + token - borders.sink_end) % max(RING, 1);
        int run = min(end - token, sink ? borders.sink_end - token : RING - row);
        i64 source = (sink ? sink_row + row : ring_row + row) * WINDOW_ROW;
        bulk_copy_once(destination, (sink ? buffers.k_sink : buffers.k_ring) + source, run * WINDOW_ROW, full, policy);
        bulk_copy_once(destination + WINDOW_BYTES, (sink ? buffers.v_sink : buffers.v_ring) + source, run * WINDOW_ROW, full, policy);
        destination += run * WINDOW_ROW;
        token += run;
      }
    }
    __syncwarp();
    turn.advance();
  }
}

// Everything that a block reads, segment after segment.
DEVICE void copy(const Query& query, const Tables& tables, const Buffers& buffers, const Plan& plan, u32 shared) {
  Turn turn;
  Segments segments(plan, tables.batch);
  if (segments.done()) return;
  Segment segment = segments.next();
  Ahead ahead;
  ahead.load(segment, tables, query);
  // Pages and lengths were written long before the launch before this one and history can be copied while that runs;
  // queries and windows are its work.
  for (int number = 0;; number++) {
    History history(segment, tables, ahead);
    if (number == 0) {
      if (!may_be_written(segment, segment.history_begin)) history.copy_stages(STAGES_BEFORE_QUERY, buffers, shared, turn);
      wait_for_predecessor();
      let_successor_start();
    } else if (QUERY_BUFFERS == 1) {
      history.copy_stages(STAGES, buffers, shared, turn);  // while the queries before these are still read
    }
    copy_query(query, segment.request, ahead.visible, number, shared);
    bool last = segments.done();
    Segment next = last ? segment : segments.next();
    Ahead next_ahead;
    next_ahead.load(next, tables, query);
    history.copy_stages(ALL_STAGES, buffers, shared, turn);
    copy_window(segment, buffers, ahead, shared, turn);
    if (last) return;
    segment = next;
    ahead = next_ahead;
  }
}
