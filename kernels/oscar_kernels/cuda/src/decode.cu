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
    Softmax softmax;
    Output output;
    softmax.clear();
    output.clear();
    if (segment.history_begin < segment.history_end) {
      QueryCodes codes;
      Values values;
      codes.load(q, query.head_stride, query.sm_scale);
      values.clear();
      int position = (segment.borders.first_stage() + segment.history_begin) * STAGE_TOKENS + part * TILE;
      int live_begin = segment.borders.sink_end - position, live_end = segment.borders.ring_begin - position;
      for (int stage = segment.history_begin; stage < segment.history_end; stage++, turn.advance()) {
        u32 keys = stage_address(base, turn.stage) + part * TILE * ROW_BYTES;
        barrier_wait(full_barrier(base, turn.stage), turn.parity);
        attend_history(softmax, values, codes, at, keys, keys + SIDE_BYTES, live_begin, live_end);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
        live_begin -= STAGE_TOKENS, live_end -= STAGE_TOKENS;
        if (stage % Values::TILES_TO_HALVE == Values::TILES_TO_HALVE - 1) values.halve(softmax);
      }
      values.finish(output);
    }
    if (segment.window_begin < segment.window_end) {
      QueryFloats columns;
      columns.load(q, query.head_stride, query.sm_scale);
      int left = segment.borders.window_tokens() - segment.window_begin * WINDOW_TOKENS;
      for (int stage = segment.window_begin; stage < segment.window_end; stage++, turn.advance(), left -= WINDOW_TOKENS) {
        u32 keys = stage_address(base, turn.stage) + head * HEAD_DIM * 2;
        barrier_wait(full_barrier(base, turn.stage), turn.parity);
        for (int tile = part; tile < WINDOW_TILES; tile += TILES_PER_STAGE) {
          int first = tile * WINDOW_TILE;
          int count = min(min(WINDOW_TOKENS, left) - first, WINDOW_TILE);
          u32 offset = first * WINDOW_ROW;
          if (count > 0) attend_window(softmax, output, columns, keys + offset, keys + SIDE_BYTES + offset, count);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
      }
    }
    Plain plain;
    settle(softmax, output, plain);
    combine(softmax, plain, exchange, head, part);
    if (part == 0) write_partial(softmax, plain, partials, segment.slot, head);
  }
}

DEVICE void copy(const Tables& tables, const Buffers& buffers, const int* prefix, u32 shared) {
  Turn turn;
  for (Segments segments(tables, prefix); !segments.done();) {
    Segment segment = segments.next();
    copy_history(segment, tables, buffers, shared, turn);
    copy_window(segment, tables, buffers, shared, turn);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) oscar_decode(
    Query query, Buffers buffers, Tables tables, Partials partials, int2* slots) {
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
  wait_for_predecessor();
  let_successor_start();
  sum_stages(tables, prefix);
  __syncthreads();
  for (int request = blockIdx.x + gridDim.x * threadIdx.x; request < tables.batch; request += gridDim.x * THREADS)
    slots[request] = slots_of(tables, prefix, request);
  if (threadIdx.x >= MATH_WARPS * 32) {
    if (REGISTERS_MOVE) give_registers<24>();
    if (threadIdx.x / 32 == MATH_WARPS) copy(tables, buffers, prefix, base);
  } else {
    if (REGISTERS_MOVE) take_registers<112>();
    attend(query, tables, partials, prefix, shared);
  }
}
