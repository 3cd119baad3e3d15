// Decode attention over an INT2 cache for compute capability 9.0: one new token per request.
//
// One block per multiprocessor takes an equal share of the batch's work (plan.cuh). A warp of it streams pages and
// window rows into shared memory by bulk copies (copies.cuh); the others, one or more per kv head, attend to them
// (history.cuh, window.cuh) and leave partial results (partial.cuh), which merge.cu puts together.
#include "copies.cuh"
#include "history.cuh"
#include "partial.cuh"
#include "window.cuh"

struct Query {
  const u16* q;  // rotated, [batch, Q_HEADS, HEAD_DIM]
  i64 token_stride, head_stride;
  float sm_scale;
};

DEVICE void attend(const Query& query, const Tables& tables, const Partials& partials, const int* prefix, char* shared) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = warp / TILES_PER_STAGE, part = warp % TILES_PER_STAGE;
  u32 base = shared_address(shared);
  float* exchange = (float*)shared;
  Lane at(head);
  Turn turn;
  for (Segments segments(tables, prefix); !segments.done();) {
    Segment segment = segments.next();
    const u16* q = query.q + segment.request * query.token_stride + head * GQA * query.head_stride;
    State state;
    Plain plain;
    if (segment.window) {
      QueryFloats columns;
      columns.load(q, query.head_stride, query.sm_scale);
      state.clear(1);
      int tokens = segment.borders.window_tokens();
      for (int stage = segment.begin; stage < segment.end; stage++, turn.advance()) {
        u32 keys = stage_address(base, turn.stage) + head * HEAD_DIM * 2;
        barrier_wait(full_barrier(base, turn.stage), turn.parity);
        for (int tile = part; tile < WINDOW_TILES; tile += TILES_PER_STAGE) {
          int first = tile * WINDOW_TILE;
          int count = min(min(WINDOW_TOKENS, tokens - stage * WINDOW_TOKENS) - first, WINDOW_TILE);
          u32 offset = first * WINDOW_STRIDE;
          if (count > 0) attend_window(state, columns, keys + offset, keys + SIDE_BYTES + offset, count);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
      }
      const float factors[4] = {1, 1, 1, 1};
      settle(state, factors, false, plain);
    } else {
      QueryCodes codes;
      codes.load(q, query.head_stride, query.sm_scale);
      state.clear(1e30f);
      int position = (segment.borders.first_stage() + segment.begin) * STAGE_TOKENS + part * TILE;
      for (int stage = segment.begin; stage < segment.end; stage++, turn.advance(), position += STAGE_TOKENS) {
        u32 keys = stage_address(base, turn.stage) + part * TILE * ROW_BYTES;
        int live_begin = segment.borders.sink_end - position, live_end = segment.borders.ring_begin - position;
        barrier_wait(full_barrier(base, turn.stage), turn.parity);
        if (live_begin < TILE && live_end > 0)
          attend_history(state, codes, at, keys, keys + SIDE_BYTES, live_begin, live_end);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
      }
      float factors[4];
      for (int plane = 0; plane < 4; plane++) factors[plane] = history_factor(state.factor, plane);
      settle(state, factors, true, plain);
    }
    combine(state, plain, exchange, head, part);
    if (part == 0) write_partial(state, plain, partials, segment.slot, head);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) oscar_decode(
    Query query, Buffers buffers, Tables tables, Partials partials, int4* slots) {
  extern __shared__ __align__(128) char shared[];
  u32 base = shared_address(shared);
  int* prefix = (int*)(shared + PREFIX_OFFSET);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      barrier_init(full_barrier(base, stage), 1);
      barrier_init(empty_barrier(base, stage), MATH_WARPS);
    }
    barrier_init_done();
  }
  sum_stages(tables, prefix);
  __syncthreads();
  let_successor_start();
  for (int request = blockIdx.x + gridDim.x * threadIdx.x; request < tables.batch; request += gridDim.x * THREADS)
    slots[request] = slots_of(tables, prefix, request);
  if (threadIdx.x / 32 == MATH_WARPS) {
    Turn turn;
    for (Segments segments(tables, prefix); !segments.done();) {
      Segment segment = segments.next();
      if (segment.window)
        copy_window(segment, tables, buffers, base, turn);
      else
        copy_history(segment, tables, buffers, base, turn);
    }
  } else {
    attend(query, tables, partials, prefix, shared);
  }
}
