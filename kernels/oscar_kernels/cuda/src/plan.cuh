// Who works on what. The work of a batch is a list of stages, request after request: of each first the history stages,
// then the window stages. Every block takes a run of it that costs the same, so all finish together whatever the lengths
// are. The part of a run that belongs to one request is a segment and yields one result.
#pragma once

#include "config.cuh"

struct Tables {
  const int* page_table;  // [batch, page_stride]
  int page_stride;
  const int* kv_lens;
  const int* ring_row;
  const int* ring_start;
  const int* sink_block;
  int batch;  // passes over all requests
};

// What is planned as a request: one of the batch, or a pass over one.
DEVICE int pass_request(int pass) { return pass / PASSES; }
// The first of a pass's new tokens. The last pass works on as many as the others, and leaves alone what they have done.
DEVICE int pass_token(int pass) { return DRAFTS == 0 ? 0 : min(pass % PASSES * QUERIES, DRAFTS - QUERIES); }
DEVICE int pass_begin(int pass) { return pass % PASSES * QUERIES; }

// What stages cost, relative to each other. A stage belongs to the block whose share its beginning lies in.
constexpr int HISTORY_COST = 8, WINDOW_COST = 8;

DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

// Borders of a request: sinks [0, sink_end), history [sink_end, ring_begin), ring [ring_begin, kv_len), where kv_len counts
// new tokens, too: what lies before them is divided as if there were none.
struct Borders {
  int sink_end, ring_begin, kv_len;

  DEVICE int window_tokens() const { return sink_end + kv_len - ring_begin; }
  DEVICE int window_stages() const { return divide_up(window_tokens(), WINDOW_TOKENS); }
  DEVICE int first_stage() const { return sink_end / STAGE_TOKENS; }  // history stages are aligned to their size
  DEVICE int history_stages() const {
    return ring_begin > sink_end ? (ring_begin - 1) / STAGE_TOKENS - first_stage() + 1 : 0;
  }
  DEVICE int cost() const { return HISTORY_COST * history_stages() + WINDOW_COST * window_stages(); }
  // Stages of each kind that begin before ``cost`` of the request's.
  DEVICE int history_before(int cost) const { return min(divide_up(cost, HISTORY_COST), history_stages()); }
  DEVICE int window_before(int cost) const {
    return divide_up(max(cost - HISTORY_COST * history_stages(), 0), WINDOW_COST);
  }
  DEVICE int last_cost() const { return window_tokens() > 0 ? WINDOW_COST : HISTORY_COST; }
};

DEVICE Borders borders_from(int kv_len, int ring_start) {
  int sink_end = min(kv_len, SINK);
  int ring_begin = RECENT == 0 ? kv_len : max(kv_len - RECENT, ring_start);
  return {sink_end, min(max(ring_begin, sink_end), kv_len), kv_len + DRAFTS};
}

// Lengths of the batch in shared memory. While copies are under way a load from global memory waits for them, several
// microseconds, so nothing but the copying warp, ahead of time, may need one.
struct Plan {
  int kv_len[MAX_BATCH];  // without new tokens in verification
  int prefix[MAX_BATCH];  // cost of the requests up to and with r
  int warp_sums[MOST_WARPS];
  u16 recent[MAX_BATCH];  // tokens behind history

  DEVICE Borders borders(int request) const {
    int length = kv_len[request];
    return {min(length, SINK), length - recent[request], length + DRAFTS};
  }
  DEVICE int before(int request) const { return request == 0 ? 0 : prefix[request - 1]; }
  DEVICE int after(int request) const { return prefix[request]; }
};
static_assert(sizeof(Plan) == PLAN_BYTES, "its place in shared memory");
static_assert(SINK + RECENT < 1 << 16 && THREADS / 32 <= MOST_WARPS, "what it has room for");

// All threads of the block take part.
DEVICE void make_plan(const Tables& tables, Plan& plan) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int base = 0; base < tables.batch; base += THREADS) {
    int request = base + threadIdx.x;
    int cost = 0;
    if (request < tables.batch) {
      int kv_len = tables.kv_lens[pass_request(request)], ring_start = tables.ring_start[pass_request(request)];
      Borders borders = borders_from(kv_len, ring_start);
      plan.kv_len[request] = kv_len;
      plan.recent[request] = kv_len - borders.ring_begin;
      cost = borders.cost();
    }
    for (int step = 1; step < 32; step *= 2) {
      int left = __shfl_up_sync(FULL_WARP, cost, step);
      if (lane >= step) cost += left;
    }
    if (lane == 31) plan.warp_sums[warp] = cost;
    __syncthreads();
    int total = 0;
    for (int other = 0; other < THREADS / 32; other++) {
      if (other == warp) cost += before + total;
      total += plan.warp_sums[other];
    }
    if (request < tables.batch) plan.prefix[request] = cost;
    before += total;
    __syncthreads();
  }
}

// How the cost of a batch is cut. With little work the last blocks stay idle; a share is at least as long as any stage, so
// a stage begins in every share and no block between two busy ones is idle. In floats, because all blocks wait for this and
// an integer division takes a hundred cycles: begin() is the same on every block and grows with the block, whatever it is
// rounded to, and owner() is corrected to agree with it.
struct Cut {
  int total, blocks;
  float share;

  DEVICE explicit Cut(int total) : total(total) {
    blocks = max(min((int)own_blocks(), total / (max(HISTORY_COST, WINDOW_COST) + 2)), 1);
    share = __fdividef((float)total, (float)blocks);
  }
  DEVICE int begin(int block) const { return block >= blocks ? total : min((int)((float)block * share), total); }
  // The block whose share holds a cost.
  DEVICE int owner(int cost) const {
    int block = min((int)__fdividef((float)cost, share), blocks - 1);
    while (begin(block) > cost) block--;
    while (begin(block + 1) <= cost) block++;
    return block;
  }
};

struct Segment {
  int request;
  int history_begin, history_end;  // stages, counted from the request's first history stage
  int window_begin, window_end;    // and from its first window stage
  int cost_begin, last_stage;      // of the request: where its costs begin, and the last of its stages
  int slot;                        // of the partial result
  Borders borders;
};

// The segments of one block, in order.
struct Segments {
  const Plan& plan;
  Cut cut;
  int cost, end, request;  // ``cost``: from where on stages are left

  DEVICE Segments(const Plan& plan, int batch) : plan(plan), cut(plan.after(batch - 1)) {
    cost = cut.begin(own_block());
    end = cut.begin(own_block() + 1);
    int low = 0, high = batch;  // before(low) <= cost < before(high), were there such a cost
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (plan.before(middle) <= cost) low = middle; else high = middle;
    }
    request = low;
    skip_to_stage();
  }

  // To the next request, unless a stage of this one begins at ``cost`` or later.
  DEVICE void skip_to_stage() {
    while (cost < end && plan.after(request) - plan.borders(request).last_cost() < cost) cost = max(cost, plan.after(request++));
  }

  DEVICE bool done() const { return cost >= end; }

  DEVICE Segment next() {
    Segment segment;
    segment.request = request;
    segment.borders = plan.borders(request);
    int before = plan.before(request), after = plan.after(request);
    int first = cost - before, last = min(end, after) - before;
    segment.history_begin = segment.borders.history_before(first);
    segment.history_end = segment.borders.history_before(last);
    segment.window_begin = segment.borders.window_before(first);
    segment.window_end = segment.borders.window_before(last);
    segment.cost_begin = before;
    segment.last_stage = after - segment.borders.last_cost();
    segment.slot = own_block() + request;  // from segment to segment one of the two counts up, so no two share a slot
    cost = min(end, after);
    if (cost == after) request++;
    skip_to_stage();
    return segment;
  }
};
