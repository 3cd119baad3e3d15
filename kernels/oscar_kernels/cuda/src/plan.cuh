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

DEVICE Borders borders_of(const Tables& tables, int request) {
  int kv_len = tables.kv_lens[request];
  int sink_end = min(kv_len, SINK);
  int ring_begin = RECENT == 0 ? kv_len : max(kv_len - RECENT, tables.ring_start[request]);
  return {sink_end, min(max(ring_begin, sink_end), kv_len), kv_len};
}

// prefix[r] = stages of the requests before r, for r = 0..batch. All threads of the block take part.
DEVICE void sum_stages(const Tables& tables, int* prefix) {
  int* warp_sums = prefix + MAX_BATCH + 1;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  if (threadIdx.x == 0) prefix[0] = 0;
  for (int base = 0; base < tables.batch; base += THREADS) {
    int request = base + threadIdx.x;
    int stages = 0;
    if (request < tables.batch) {
      Borders borders = borders_of(tables, request);
      stages = borders.window_stages() + borders.history_stages();
    }
    for (int step = 1; step < 32; step *= 2) {
      int left = __shfl_up_sync(FULL_WARP, stages, step);
      if (lane >= step) stages += left;
    }
    if (lane == 31) warp_sums[warp] = stages;
    __syncthreads();
    int total = 0;
    for (int other = 0; other < THREADS / 32; other++) {
      if (other == warp) stages += before + total;
      total += warp_sums[other];
    }
    if (request < tables.batch) prefix[request + 1] = stages;
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
  int slot;                        // of the partial result
  Borders borders;
};

// The segments of one block, in order.
struct Segments {
  const Tables& tables;
  const int* prefix;
  int stage, end, request;

  DEVICE Segments(const Tables& tables, const int* prefix) : tables(tables), prefix(prefix) {
    int total = prefix[tables.batch];
    stage = share_begin(total, blockIdx.x);
    end = share_begin(total, blockIdx.x + 1);
    int low = 0, high = tables.batch;  // prefix[low] <= stage < prefix[high], were there such a stage
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (prefix[middle] <= stage) low = middle; else high = middle;
    }
    request = low;
  }

  DEVICE bool done() const { return stage >= end; }

  DEVICE Segment next() {
    while (prefix[request + 1] <= stage) request++;
    Segment segment;
    segment.request = request;
    segment.borders = borders_of(tables, request);
    int history = segment.borders.history_stages();
    int first = stage - prefix[request], last = min(end, prefix[request + 1]) - prefix[request];
    segment.history_begin = min(first, history);
    segment.history_end = min(last, history);
    segment.window_begin = max(first - history, 0);
    segment.window_end = max(last - history, 0);
    segment.slot = blockIdx.x + request;  // from segment to segment one of the two counts up, so no two share a slot
    stage = prefix[request] + last;
    return segment;
  }
};

// Where merge.cu finds the partial results of a request: slots [x, y).
DEVICE int2 slots_of(const Tables& tables, const int* prefix, int request) {
  int total = prefix[tables.batch], begin = prefix[request], end = prefix[request + 1];
  if (begin == end) return make_int2(0, 0);
  return make_int2(owner(total, begin) + request, owner(total, end - 1) + request + 1);
}
