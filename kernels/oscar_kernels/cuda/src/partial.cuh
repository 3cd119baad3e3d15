// The end of a segment: the warps of a kv head put their states together and leave one result, a partial one where other
// blocks work on the same request.
#pragma once

#include "plan.cuh"
#include "softmax.cuh"

struct Partials {
  float* out;     // [slots, ROWS, HEAD_DIM], normalized
  float* lse;     // [slots, ROWS], log2; -infinity where there was nothing to attend to
  u32* counters;  // [MAX_BATCH], 0 between launches
  float* spill;   // [blocks, MATH_WARPS, SPILL_WORDS, 32 lanes]; what sums of a warp's long segment were, see FloatValues

  DEVICE float* own_spill(int warp) const {
    return spill + ((i64)own_block() * MATH_WARPS + warp) * SPILL_WORDS * 32 + threadIdx.x % 32;
  }
};

// A NaN is passed on.
DEVICE float log_sum(float top, float total) { return total == 0 ? minus_infinity() : top + log2_fast(total); }

struct Result {
  u16* out;  // [batch, Q_HEADS, HEAD_DIM], in verification [batch * DRAFTS, Q_HEADS, HEAD_DIM]
  i64 token_stride, head_stride;
  float* lse;  // [batch, Q_HEADS], in verification [batch * DRAFTS, Q_HEADS], log2; only where WRITES_LSE

  // Token and query head of a row of a pass; false where another pass writes them.
  DEVICE bool place(int pass, int row, int& token, int& head) const {
    token = pass;
    head = row;
    if (DRAFTS == 0) return true;
    int own = pass_token(pass) + row % COLUMNS / GQA;
    token = pass_request(pass) * DRAFTS + own;
    head = row / COLUMNS * GQA + row % GQA;
    return own >= pass_begin(pass);
  }

  // COUNT neighbouring channels, 2 or 4, of a row of a pass.
  template <int COUNT>
  DEVICE void write(int pass, int row, int channel, const float (&x)[COUNT], float factor) const {
    int token, head;
    if (!place(pass, row, token, head)) return;
    u16* at = out + token * token_stride + head * head_stride + channel;
    u32 low = pack_halves<Q_BF16>(x[0] * factor, x[1] * factor);
    if constexpr (COUNT == 4) *(uint2*)at = make_uint2(low, pack_halves<Q_BF16>(x[2] * factor, x[3] * factor));
    else *(u32*)at = low;
  }
  DEVICE void write_lse(int pass, int row, float top, float total) const {
    int token, head;
    if (WRITES_LSE && place(pass, row, token, head)) lse[token * Q_HEADS + head] = log_sum(top, total);
  }
};

// Sum over the lanes of a head.
DEVICE float sum_tokens(float x) {
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
  return x;
}

// Outputs of this lane's heads with scale and zero point in them, still unnormalized: channel output_channel(run) + i.
constexpr int RUN = ValueRows::NARROW ? 2 : 4;        // neighbouring channels that a lane holds
constexpr int RUNS = HEAD_DIM / (8 * RUN);
struct Plain {
  float out[QK_BLOCKS][RUNS][RUN];
};

DEVICE int output_channel(int run) {
  int row = threadIdx.x % 32 / 4;
  return ValueRows::channel(run % ValueRows::PLANES, run / ValueRows::PLANES * 32 + RUN * row);
}
DEVICE constexpr int group_of_run(int run) {
  return ValueRows::group(run % ValueRows::PLANES, run / ValueRows::PLANES * 32);
}

DEVICE void store_run(float* at, const float (&x)[RUN], float factor) {
  if constexpr (RUN == 4) {
    *(float4*)at = make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
  } else {
    *(float2*)at = make_float2(x[0] * factor, x[1] * factor);
  }
}
DEVICE void load_run(float (&x)[RUN], const float* at) {
  if constexpr (RUN == 4) {
    float4 y = *(const float4*)at;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    float2 y = *(const float2*)at;
    x[0] = y.x, x[1] = y.y;
  }
}

// Sums totals over all tokens and brings outputs and zero points together.
DEVICE void settle(Softmax& softmax, const Output& output, Plain& plain) {
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    softmax.total[b] = sum_tokens(softmax.total[b]);
    float shift[V_GROUPS];
#pragma unroll
    for (int g = 0; g < V_GROUPS; g++) shift[g] = sum_tokens(softmax.shift[b][g]);
#pragma unroll
    for (int run = 0; run < RUNS; run++)
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        constexpr int PLANES = ValueRows::PLANES;
        const float* acc = output.acc[b / 2][run / PLANES * 2 * PLANES + i / 2 * PLANES + run % PLANES];
        float x = PAIRED ? acc[2 * (i % 2)] + acc[2 * (i % 2) + 1] : acc[2 * (i % 2) + b % 2];
        plain.out[b][run][i] = x - shift[group_of_run(run)];
      }
  }
}

// Folds the results of the TILES_PER_STAGE warps of a head into the first one's, some query heads at a time. Every warp of
// the head takes part.
DEVICE void combine(Softmax& softmax, Plain& plain, float* exchange, int head, int part) {
  if (TILES_PER_STAGE == 1) return;
  int lane = threadIdx.x % 32;
  for (int width = TILES_PER_STAGE / 2; width > 0; width /= 2) {
    float* numbers = exchange + (head * (TILES_PER_STAGE / 2) + part % width) * PARTIAL_FLOATS + lane % EXCHANGED * PARTIAL_ROW;
    bool giver = part >= width && part < 2 * width;
#pragma unroll
    for (int b = 0; b < QK_BLOCKS; b++) {
#pragma unroll 1
      for (int first = 0; first < 4 && 4 * b + first < COLUMNS; first += EXCHANGED) {
        bool own = lane % 4 / EXCHANGED * EXCHANGED == first;
        if (giver && own) {
          if (lane < 4) {
            numbers[HEAD_DIM] = softmax.top[b];
            numbers[HEAD_DIM + 1] = softmax.total[b];
          }
#pragma unroll
          for (int run = 0; run < RUNS; run++) store_run(numbers + output_channel(run), plain.out[b][run], 1);
        }
        named_barrier(1 + head, 32 * TILES_PER_STAGE);
        if (part < width && own) {
          float other = numbers[HEAD_DIM];
          float top = fmaxf(softmax.top[b], other);
          float mine = exp2_fast(softmax.top[b] - top), theirs = exp2_fast(other - top);
          softmax.top[b] = top;
          softmax.total[b] = softmax.total[b] * mine + numbers[HEAD_DIM + 1] * theirs;
#pragma unroll
          for (int run = 0; run < RUNS; run++) {
            float given[RUN];
            load_run(given, numbers + output_channel(run));
            for (int i = 0; i < RUN; i++) plain.out[b][run][i] = plain.out[b][run][i] * mine + given[i] * theirs;
          }
        }
        named_barrier(1 + head, 32 * TILES_PER_STAGE);
      }
    }
  }
}

// ``alone``: no other block works on the request.
DEVICE void write_result(const Softmax& softmax, const Plain& plain, const Partials& partials, const Result& result,
                         const Segment& segment, bool alone, int kv_head) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int b = 0; b < QK_BLOCKS; b++) {
    if (!head_exists(b)) continue;
    int head = kv_head * COLUMNS + 4 * b + lane % 4;
    i64 row = (i64)segment.slot * ROWS + head;
    float inverse = softmax.total[b] == 0 ? 0.0f : 1.0f / softmax.total[b];
    if (lane < 4 && alone) result.write_lse(segment.request, head, softmax.top[b], softmax.total[b]);
    if (lane < 4 && !alone) partials.lse[row] = log_sum(softmax.top[b], softmax.total[b]);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      if (alone) result.write(segment.request, head, output_channel(run), plain.out[b][run], inverse);
      else store_run(partials.out + row * HEAD_DIM + output_channel(run), plain.out[b][run], inverse);
    }
  }
}

// Requests of length 0.
DEVICE void write_zeros(const Result& result, const Plan& plan, int batch) {
  for (int request = own_block(); request < batch; request += own_blocks()) {
    if (plan.before(request) < plan.after(request)) continue;
    wait_for_predecessor();  // write-after-read hazard: it may still read what lies there
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM / 4; i += MATH_WARPS * 32) {
      float zeros[4] = {};
      result.write(request, i * 4 / HEAD_DIM, i * 4 % HEAD_DIM, zeros, 1);
      if (i * 4 % HEAD_DIM == 0) result.write_lse(request, i * 4 / HEAD_DIM, 0, 0);
    }
  }
}
