// Merge: the partial results of every request and query head, weighted by their log-sum-exp.
//
// A thread merges four channels. Few requests have many partial results each: then a block shares them and takes 32 channels
// of one head, so that all are read at once (oscar_merge_many). Many requests have few: then a thread reads them all, and
// nothing waits for anything (oscar_merge_few).
#include "config.cuh"

constexpr int AHEAD = 4;  // partial results that are asked for before their weights are known

struct Partial {
  float top, total;
  float4 sum;
};

DEVICE float4 scaled_sum(float4 x, float a, float4 y, float b) {
  return make_float4(x.x * a + y.x * b, x.y * a + y.y * b, x.z * a + y.z * b, x.w * a + y.w * b);
}

// Two partial results become one; the total of an empty one is 0.
DEVICE Partial join(const Partial& x, const Partial& y) {
  float top = fmaxf(x.top, y.top);
  float a = x.total == 0 ? 0 : exp2_fast(x.top - top), b = y.total == 0 ? 0 : exp2_fast(y.top - top);
  return {top, x.total * a + y.total * b, scaled_sum(x.sum, a, y.sum, b)};
}

struct Rows {
  const float* out;  // of the head's first partial result, this lane's channels
  const float* lse;
  int count;

  // Results first, first + step, ...
  DEVICE Partial merge(int first, int step) const {
    Partial sum = {minus_infinity(), 0, make_float4(0, 0, 0, 0)};
    for (int i = first; i < count; i += AHEAD * step) {
      Partial next[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        bool live = i + k * step < count;
        i64 at = (i64)(i + k * step) * Q_HEADS;
        next[k].top = live ? lse[at] : minus_infinity();
        next[k].sum = live ? *(const float4*)(out + at * HEAD_DIM) : make_float4(0, 0, 0, 0);
        next[k].total = next[k].top == minus_infinity() ? 0 : 1;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; k++) sum = join(sum, next[k]);
    }
    return sum;
  }
};

DEVICE void write(const Partial& x, u16* at) {
  float inverse = x.total == 0 ? 0 : 1.0f / x.total;  // a NaN is passed on
  *(uint2*)at = make_uint2(pack_halves<Q_BF16>(x.sum.x * inverse, x.sum.y * inverse),
                           pack_halves<Q_BF16>(x.sum.z * inverse, x.sum.w * inverse));
}

DEVICE Rows rows_of(const float* out, const float* lse, int2 range, int head, int channel) {
  i64 first = (i64)range.x * Q_HEADS + head;
  return {out + first * HEAD_DIM + channel, lse + first, range.y - range.x};
}

// Threads of a head, and heads of a block: one thread for four channels.
constexpr int LANES = HEAD_DIM / 4;
constexpr int FEW_THREADS = 256;

// Grid (ceil(Q_HEADS * LANES / FEW_THREADS), batch).
extern "C" __global__ void __launch_bounds__(FEW_THREADS) oscar_merge_few(
    const float* out, const float* lse, const int2* slots, u16* result, i64 token_stride, i64 head_stride) {
  wait_for_predecessor();
  let_successor_start();
  int request = blockIdx.y;
  int head = (blockIdx.x * FEW_THREADS + threadIdx.x) / LANES, channel = threadIdx.x % LANES * 4;
  if (head >= Q_HEADS) return;
  Partial sum = rows_of(out, lse, slots[request], head, channel).merge(0, 1);
  write(sum, result + request * token_stride + head * head_stride + channel);
}

constexpr int SLICE_LANES = 8;
constexpr int MANY_ROWS = 32;
constexpr int MANY_THREADS = MANY_ROWS * SLICE_LANES;

// Grid (Q_HEADS, batch, HEAD_DIM / 32).
extern "C" __global__ void __launch_bounds__(MANY_THREADS) oscar_merge_many(
    const float* out, const float* lse, const int2* slots, u16* result, i64 token_stride, i64 head_stride) {
  __shared__ Partial rows[MANY_THREADS / 32][SLICE_LANES];
  wait_for_predecessor();
  let_successor_start();
  int head = blockIdx.x, request = blockIdx.y, warp = threadIdx.x / 32;
  int lane = threadIdx.x % SLICE_LANES, channel = blockIdx.z * 32 + lane * 4;
  Partial sum = rows_of(out, lse, slots[request], head, channel).merge(threadIdx.x / SLICE_LANES, MANY_ROWS);
  for (int step = SLICE_LANES; step < 32; step *= 2) {
    auto other = [&](float x) { return __shfl_xor_sync(FULL_WARP, x, step); };
    float4 x = make_float4(other(sum.sum.x), other(sum.sum.y), other(sum.sum.z), other(sum.sum.w));
    sum = join(sum, {other(sum.top), other(sum.total), x});
  }
  if (threadIdx.x % 32 < SLICE_LANES) rows[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= SLICE_LANES) return;
  for (int other = 1; other < MANY_THREADS / 32; other++) sum = join(sum, rows[other][lane]);
  write(sum, result + request * token_stride + head * head_stride + channel);
}
