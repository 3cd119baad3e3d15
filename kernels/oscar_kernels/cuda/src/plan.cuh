// Who works on what. The work of a batch is a list of stages, request after request: of each first the history stages,
// then the window stages. Every block takes an equal run of it, so all finish together whatever the lengths are. The
// part of a run that belongs to one request is a segment and yields one partial result.
#pragma once

#include "config.cuh"

struct Tables {
  const int* page_table;  // [batch, page_stride]
  int page_stride;
  const int* kv_lens;
  const int* ring_row;
  const int* ring_start;
  const int* sink_block;
  int batch;
};

// Borders of a request: sinks [0, sink_end), history [sink_end, ring_begin), ring [ring_begin, kv_len).
struct Borders {
  int sink_end, ring_begin, kv_len;

  DEVICE int window_tokens() const { return sink_end + kv_len - ring_begin; }
  DEVICE int window_stages() const { return (window_tokens() + WINDOW_TOKENS - 1) / WINDOW_TOKENS; }
  DEVICE int first_stage() const { return sink_end / STAGE_TOKENS; }  // history stages are aligned to their size
  DEVICE int history_stages() const {
    return ring_begin > sink_end ? (ring_begin - 1) / STAGE_TOKENS - first_stage() + 1 : 0;
  }
};

DEVICE Borders borders_from(int kv_len, int ring_start) {
  int sink_end = min(kv_len, SINK);
  int ring_begin = RECENT == 0 ? kv_len : max(kv_len - RECENT, ring_start);
  return {sink_end, min(max(ring_begin, sink_end), kv_len), kv_len};
}

// Lengths of the batch in shared memory. While copies are under way a load from global memory waits for them, several
// microseconds, so nothing but the copying warp, ahead of time, may need one.
struct Plan {
  int kv_len[MAX_BATCH], ring_start[MAX_BATCH];
  int prefix[MAX_BATCH];  // stages of the requests up to and with r
  int warp_sums[32];

  DEVICE Borders borders(int request) const { return borders_from(kv_len[request], ring_start[request]); }
  DEVICE int before(int request) const { return request == 0 ? 0 : prefix[request - 1]; }
  DEVICE int after(int request) const { return prefix[request]; }
};
static_assert(sizeof(Plan) == (3 * MAX_BATCH + 32) * 4, "its place in shared memory");

// All threads of the block take part.
DEVICE void make_plan(const Tables& tables, Plan& plan) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int base = 0; base < tables.batch; base += THREADS) {
    int request = base + threadIdx.x;
    int stages = 0;
    if (request < tables.batch) {
      int kv_len = tables.kv_lens[request], ring_start = tables.ring_start[request];
      plan.kv_len[request] = kv_len;
      plan.ring_start[request] = ring_start;
      Borders borders = borders_from(kv_len, ring_start);
      stages = borders.window_stages() + borders.history_stages();
    }
    for (int step = 1; step < 32; step *= 2) {
      int left = __shfl_up_sync(FULL_WARP, stages, step);
      if (lane >= step) stages += left;
    }
    if (lane == 31) plan.warp_sums[warp] = stages;
    __syncthreads();
    int total = 0;
    for (int other = 0; other < THREADS / 32; other++) {
      if (other == warp) stages += before + total;
      total += plan.warp_sums[other];
    }
    if (request < tables.batch) plan.prefix[request] = stages;
    before += total;
    __syncthreads();
  }
}

// With fewer stages than blocks the last blocks stay idle, so that no block between two busy ones does.
DEVICE int busy_blocks(int stages) { return min((int)gridDim.x, stages); }
DEVICE int share_begin(int stages, int block) {
  int blocks = busy_blocks(stages);
  return block >= blocks ? stages : (int)((i64)stages * block / blocks);
}
// The block whose share holds a stage.
DEVICE int owner(int stages, int stage) { return (int)((((i64)stage + 1) * busy_blocks(stages) - 1) / stages); }

struct Segment {
  int request;
  int history_begin, history_end;  // stages, counted from the request's first history stage
  int window_begin, window_end;    // and from its first window stage
  int first_block, blocks;         // who works on the request
  int slot;                        // of the partial result
  Borders borders;
};

// The segments of one block, in order.
struct Segments {
  const Plan& plan;
  int total, stage, end, request;

  DEVICE Segments(const Plan& plan, int batch) : plan(plan), total(plan.after(batch - 1)) {
    stage = share_begin(total, blockIdx.x);
    end = share_begin(total, blockIdx.x + 1);
    int low = 0, high = batch;  // before(low) <= stage < before(high), were there such a stage
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (plan.before(middle) <= stage) low = middle; else high = middle;
    }
    request = low;
  }

  DEVICE bool done() const { return stage >= end; }

  DEVICE Segment next() {
    while (plan.after(request) <= stage) request++;
    Segment segment;
    segment.request = request;
    segment.borders = plan.borders(request);
    int history = segment.borders.history_stages();
    int before = plan.before(request);
    int first = stage - before, last = min(end, plan.after(request)) - before;
    segment.history_begin = min(first, history);
    segment.history_end = min(last, history);
    segment.window_begin = max(first - history, 0);
    segment.window_end = max(last - history, 0);
    segment.first_block = owner(total, before);
    segment.blocks = owner(total, plan.after(request) - 1) - segment.first_block + 1;
    segment.slot = blockIdx.x + request;  // from segment to segment one of the two counts up, so no two share a slot
    stage = before + last;
    return segment;
  }
};
