// Decode attention over an INT2 cache for compute capability 9.0: one new token per request, or several in verification.
//
// One block per multiprocessor takes an equal share of the batch's work (plan.cuh, block.cuh). A warp of it streams pages
// and window rows into shared memory by bulk copies (copies.cuh); the others, one or more per kv head, attend to them
// (history.cuh, window.cuh) and write results (partial.cuh). Blocks that share a request merge theirs (merge.cuh); where
// values are stored multiplied, all blocks leave partial results and what comes of them is multiplied back (multiply.cuh).
#include "block.cuh"
#include "history.cuh"
#include "window.cuh"

#ifndef OSCAR_RUN_STAGES  // tests have shorter runs
#define OSCAR_RUN_STAGES Values::RUN_STAGES
#endif

DEVICE void attend(
    float sm_scale, int batch, const Partials& partials, const Result& result, const Reading& reading, const Plan& plan,
    char* shared) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int head = warp / TILES_PER_STAGE, part = warp % TILES_PER_STAGE;
  u32 base = shared_address(shared);
  float* exchange = (float*)shared;
  Lane at(head);
  if (HAS_BOOK) at.book = points_address(base, head);
  Turn turn;
  int number = 0;
  Shared with_others[2] = {};
  Segments segments(plan, batch);
  for (; !segments.done(); number++) {
    Segment segment = segments.next();
    Shared with = {};
    if (!MULTIPLIES) with = Shared::of(segment, segments.cut);
    u32 q = query_address(base, number) + head * COLUMNS * HEAD_DIM * 2;
    barrier_wait(query_full(base, number), query_parity(number));
    Softmax softmax;
    Output output;
    softmax.clear();
    output.clear();
    if (segment.history_begin < segment.history_end) {
      QueryCodes codes;
      Values values;
      if (HAS_BOOK) barrier_wait(book_barrier(base), 0);
      codes.load(q, sm_scale, base + DIGITS_OFFSET + head * DIGIT_BYTES, head, part, factors_address(base, head));
      values.clear();
      int position = (segment.borders.first_stage() + segment.history_begin) * STAGE_TOKENS + part * TILE;
      int live_begin = segment.borders.sink_end - position, live_end = segment.borders.ring_begin - position;
      // In runs, so that what keeps sums in bounds is not part of the loop over stages.
      bool spilled = false;
      for (int stage = segment.history_begin;;) {
        int stop = min(segment.history_end, (stage / OSCAR_RUN_STAGES + 1) * OSCAR_RUN_STAGES);
        for (; stage < stop; stage++, turn.advance()) {
          u32 keys = stage_address(base, turn.stage), values_at = keys + KEY_BYTES + part * TILE * ValueRows::ROW_BYTES;
          keys += part * TILE * KeyRows::ROW_BYTES;
          barrier_wait(full_barrier(base, turn.stage), turn.parity);
          Scores scores;
          scores.multiply(codes, at, keys, values_at);
          scores.keep(live_begin, live_end);
          Values::Columns columns;
          scores.weigh(columns, softmax, values, codes);
          values.add(columns, at, values_at + at.value_even, values_at + at.value_odd);
          __syncwarp();
          if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
          live_begin -= STAGE_TOKENS, live_end -= STAGE_TOKENS;
        }
        if (stage == segment.history_end) break;
        values.make_room(softmax, partials.own_spill(warp), !spilled);
        spilled = true;
      }
      values.finish(output, softmax, partials.own_spill(warp), spilled);
    }
    if (segment.window_begin < segment.window_end) {
      QueryFloats columns;
      columns.load(q, sm_scale);
      int left = segment.borders.window_tokens() - segment.window_begin * WINDOW_TOKENS;
      for (int stage = segment.window_begin; stage < segment.window_end; stage++, turn.advance(), left -= WINDOW_TOKENS) {
        u32 keys = stage_address(base, turn.stage) + head * HEAD_DIM * 2;
        barrier_wait(full_barrier(base, turn.stage), turn.parity);
        for (int tile = part; tile < WINDOW_TILES; tile += TILES_PER_STAGE) {
          int first = tile * WINDOW_TILE;
          int count = min(min(WINDOW_TOKENS, left) - first, WINDOW_TILE);
          u32 offset = first * WINDOW_ROW;
          Fresh fresh{left - DRAFTS - first, query_address(base, number) + QUERY_BYTES};
          if (count > 0) attend_window(softmax, output, columns, keys + offset, keys + WINDOW_BYTES + offset, count, fresh);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(query_empty(base, number));
    Plain plain;
    settle(softmax, output, plain);
    combine(softmax, plain, exchange, head, part);
    if (part == 0) write_result(softmax, plain, partials, result, segment, !MULTIPLIES && with.none(), head);
    (number == 0 ? with_others[0] : with_others[1]) = with;
  }
  conclude(segments.cut, with_others, batch, partials, result, reading, plan, shared);
}

DEVICE void run(
    Query query, Buffers buffers, Tables tables, Partials partials, Result result, Reading reading, Books books) {
  extern __shared__ __align__(128) char shared[];
  run_block(query, buffers, tables, partials, result, reading, books, shared);
}

#if !OSCAR_PART  // else it is run by decode_pair.cu
extern "C" __global__ void __launch_bounds__(THREADS, 1) oscar_decode(
    Query query, Buffers buffers, Tables tables, Partials partials, Result result, Reading reading, Books books) {
  run(query, buffers, tables, partials, result, reading, books);
}
#endif
