// Verification of several new tokens of a request on compute capability 9.0, with products of four warps side by side: 17 to
// 32 query heads of all new tokens read a kv head together. Everything but the arithmetic is that of decode.cu.
#include "block.cuh"
#include "team_window.cuh"

#ifndef OSCAR_RUN_STAGES  // tests have shorter runs
#define OSCAR_RUN_STAGES TeamState::RUN_STAGES
#endif

// Tokens of a stage [begin, end) count; the others may hold anything.
struct Live {
  int begin, end;

  DEVICE bool all() const { return begin <= 0 && end >= STAGE_TOKENS; }
  DEVICE void keep(TeamLogits& logits, const Team& team) const {
    if (all()) return;
#pragma unroll
    for (int row = 0; row < 2; row++)
      if (!has(row, team))
        for (float& x : logits.x[row]) x = minus_infinity();
  }
  DEVICE void keep(TokenParams& params, const Team& team) const {
    if (all()) return;
#pragma unroll
    for (int row = 0; row < 2; row++)
      if (!has(row, team)) params[row][0] = params[row][1] = {0, 0};
  }
  DEVICE bool has(int row, const Team& team) const {
    int token = 16 * team.warp + 8 * row + team.lane / 4;
    return token >= begin && token < end;
  }
};

// q.k = s (q.c - z sum(q)), per group.
DEVICE void read_logits(TeamLogits& logits, const TeamKeys& keys, const TokenParams& params, const TeamState& state, const Team& team) {
  float a[2][K_GROUPS], b[2][K_GROUPS];
#pragma unroll
  for (int row = 0; row < 2; row++)
#pragma unroll
    for (int g = 0; g < K_GROUPS; g++) {
      a[row][g] = params[row][g].scale * team.unit;
      b[row][g] = -a[row][g] * params[row][g].zero;
    }
#pragma unroll
  for (int k = 0; k < OWN; k += 2) {
    uint2 first = load_shared2(team.query_sums(0) + 4 * column_of(k)), second = load_shared2(team.query_sums(1) + 4 * column_of(k));
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int row = 0; row < 2; row++) {
        float y = fmaf(b[row][0], as_float(i ? first.y : first.x), -state.top[k + i]);
        y = fmaf(b[row][1], as_float(i ? second.y : second.x), y);
        y = fmaf(a[row][0], keys.of(0, row, k + i), y);
        logits.x[row][k + i] = fmaf(a[row][1], keys.of(1, row, k + i), y);
      }
  }
}

// The history of a segment. Products with the keys of a stage run while weights of the stage before it are calculated, those
// with its values while logits of the next one are.
DEVICE void attend_history(TeamState& state, const Team& team, const Segment& segment, Turn& turn, u32 base, float* spill) {
  u32 at = stage_address(base, turn.stage);
  int position = (segment.borders.first_stage() + segment.history_begin) * STAGE_TOKENS;
  Live live{segment.borders.sink_end - position, segment.borders.ring_begin - position};
  u32 codes = team.head * KeyRows::CODE_BYTES, value_codes = KEY_BYTES + team.head * ValueRows::CODE_BYTES;
  int token = 16 * team.warp + team.lane / 4;
  u32 key_params = token * KeyRows::ROW_BYTES + KeyRows::PARAMS_OFFSET + team.head * KeyRows::PARAM_BYTES;
  u32 value_params = KEY_BYTES + token * ValueRows::ROW_BYTES + ValueRows::PARAMS_OFFSET + team.head * ValueRows::PARAM_BYTES;
  TeamKeys keys;
  state.begin();
  barrier_wait(full_barrier(base, turn.stage), turn.parity);
  keys.multiply(at + codes, team);
  keys.wait();
  bool spilled = false;
  u32 buffer = 0;
  for (int stage = segment.history_begin;;) {
    int stop = min(segment.history_end, (stage / OSCAR_RUN_STAGES + 1) * OSCAR_RUN_STAGES);
    for (; stage < stop; stage++, buffer ^= 1) {
      TokenParams params;
      load_params(params, at + key_params, KeyRows::ROW_BYTES);
      TeamLogits logits;
      read_logits(logits, keys, params, state, team);
      live.keep(logits, team);
      Turn next = turn;
      if (stage + 1 < segment.history_end) next.advance();  // else these keys once more
      u32 next_at = stage_address(base, next.stage);
      barrier_wait(full_barrier(base, next.stage), next.parity);
      state.wait();
      keys.multiply(next_at + codes, team);
      load_params(params, at + value_params, ValueRows::ROW_BYTES);
      live.keep(params, team);
      u32 columns = team.weights + buffer * WEIGHT_BYTES;
      TeamWeights weights;
      bool wrong = weights.write(logits, params, state.factor, team, columns);
      TeamValues values;
      values.load(at + value_codes, team);
      // Weights times value scales far above their maximum so far are rare after the first stages.
      if (barrier_any(team.barrier(), 128, wrong || state.none_yet())) {
        state.raise(logits, params, team);
        weights.write(logits, params, state.factor, team, columns);
        team.meet();
      }
      keys.wait();
      values.multiply(state, columns);
      weights.count(state, params);
      __syncwarp();
      if (team.lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
      if (stage + 1 < segment.history_end) turn = next;
      at = next_at;
      live.begin -= STAGE_TOKENS, live.end -= STAGE_TOKENS;
    }
    state.wait();
    if (stage == segment.history_end) break;
    state.make_room(spill, !spilled);
    spilled = true;
  }
  turn.advance();
  state.finish(spill, spilled);
  team.meet();  // nobody reads weights any more
}

DEVICE void attend_windows(TeamState& state, const Team& team, const Segment& segment, Turn& turn, u32 base, u32 q, float sm_scale,
                           u32 visible) {
  TeamWindow window;
  window.load(q, sm_scale, team);
  int left = segment.borders.window_tokens() - segment.window_begin * WINDOW_TOKENS, buffer = 0;
  for (int stage = segment.window_begin; stage < segment.window_end; stage++, turn.advance(), left -= WINDOW_TOKENS) {
    u32 keys = stage_address(base, turn.stage) + team.head * HEAD_DIM * 2;
    barrier_wait(full_barrier(base, turn.stage), turn.parity);
    for (int first = 0; first < min(WINDOW_TOKENS, left); first += WINDOW_TILE, buffer ^= 1) {
      u32 at = keys + first * WINDOW_ROW;
      int count = min(min(WINDOW_TOKENS, left) - first, WINDOW_TILE);
      window.attend(state, at, at + WINDOW_BYTES, count, Fresh{left - DRAFTS - first, visible}, buffer, team);
    }
    __syncwarp();
    if (team.lane == 0) barrier_arrive(empty_barrier(base, turn.stage));
  }
}

// Sums totals and shifts over the tokens of all lanes and warps.
DEVICE void settle(TeamState& state, const Team& team) {
  u32 at = team.weights + 2 * LOGIT_BYTES;  // [1 + groups][warps][columns], which no logits are in
  static_assert(2 * LOGIT_BYTES + (1 + V_GROUPS) * 4 * PRODUCT_COLUMNS * 4 <= 2 * WEIGHT_BYTES, "place for numbers of all warps");
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    float x[1 + V_GROUPS] = {state.total[k], state.shift[k][0], state.shift[k][1]};
    for (int of = 0; of < 1 + V_GROUPS; of++) {
      for (int step = 4; step < 32; step *= 2) x[of] += __shfl_xor_sync(FULL_WARP, x[of], step);
      if (team.lane < 4) store_shared(at + ((4 * of + team.warp) * PRODUCT_COLUMNS + column_of(k)) * 4, __float_as_uint(x[of]));
    }
  }
  team.meet();
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    float x[1 + V_GROUPS] = {};
    for (int of = 0; of < 1 + V_GROUPS; of++)
      for (int w = 0; w < 4; w++) x[of] += as_float(load_shared(at + ((4 * of + w) * PRODUCT_COLUMNS + column_of(k)) * 4));
    state.total[k] = x[0], state.shift[k][0] = x[1], state.shift[k][1] = x[2];
  }
}

// ``alone``: no other block works on the request.
DEVICE void write_result(const TeamState& state, const Partials& partials, const Result& result, const Segment& segment, bool alone,
                         const Team& team) {
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    if (column_of(k) >= COLUMNS) continue;
    int head = team.head * COLUMNS + column_of(k);
    i64 row = (i64)segment.slot * ROWS + head;
    float inverse = state.total[k] == 0 ? 0.0f : 1.0f / state.total[k];
    bool first = team.warp == 0 && team.lane < 4;
    if (first && alone) result.write_lse(segment.request, head, state.top[k], state.total[k]);
    if (first && !alone) partials.lse[row] = log_sum(state.top[k], state.total[k]);
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
      int channel = ValueRows::channel(plane, 16 * team.warp + 2 * (team.lane / 4));
      const float* sums = state.sums[plane] + k / 2 * 4 + k % 2;
      float pair[2] = {sums[0] - state.shift[k][plane / 2], sums[2] - state.shift[k][plane / 2]};
      if (alone) result.write(segment.request, head, channel, pair, inverse);
      else *(float2*)(partials.out + row * HEAD_DIM + channel) = make_float2(pair[0] * inverse, pair[1] * inverse);
    }
  }
}

DEVICE void attend(float sm_scale, int batch, const Partials& partials, const Result& result, const Reading& reading, const Plan& plan,
                   char* shared) {
  u32 base = shared_address(shared);
  Team team(base);
  Turn turn;
  int number = 0;
  Shared with_others[2] = {};
  Segments segments(plan, batch);
  for (; !segments.done(); number++) {
    Segment segment = segments.next();
    Shared with = {};
    if (!MULTIPLIES) with = Shared::of(segment, segments.cut);
    u32 queries = query_address(base, number), q = queries + team.head * COLUMNS * HEAD_DIM * 2;
    barrier_wait(query_full(base, number), query_parity(number));
    TeamState state;
    state.clear();
    if (segment.history_begin < segment.history_end) {
      team.load(q, sm_scale);
      attend_history(state, team, segment, turn, base, partials.own_spill(4 * team.head + team.warp));
    }
    if (segment.window_begin < segment.window_end)
      attend_windows(state, team, segment, turn, base, q, sm_scale, queries + QUERY_BYTES);
    __syncwarp();
    if (team.lane == 0) barrier_arrive(query_empty(base, number));
    settle(state, team);
    write_result(state, partials, result, segment, !MULTIPLIES && with.none(), team);
    (number == 0 ? with_others[0] : with_others[1]) = with;
  }
  conclude(segments.cut, with_others, batch, partials, result, reading, plan, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) oscar_verify(
    Query query, Buffers buffers, Tables tables, Partials partials, Result result, Reading reading, Books books) {
  extern __shared__ __align__(128) char shared[];
  run_block(query, buffers, tables, partials, result, reading, books, shared);
}
