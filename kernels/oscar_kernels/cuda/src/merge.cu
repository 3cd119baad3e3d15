// Merge: the partial results of every request and query head, weighted by their log-sum-exp. Grid (Q_HEADS, batch).
#include "config.cuh"

constexpr int LANES = HEAD_DIM / 4;          // threads that cover a partial result, four channels each
constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int ROWS = MERGE_THREADS / LANES;  // partial results read at a time
constexpr int MAX_SLOTS = 1024;              // of a request: at most one for each block of oscar_decode

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) oscar_merge(
    const float* out, const float* lse, const int2* slots, u16* result, i64 token_stride, i64 head_stride) {
  __shared__ float weights[MAX_SLOTS];
  __shared__ float reduced[MERGE_WARPS];
  __shared__ float4 sums[ROWS][LANES];
  int head = blockIdx.x, request = blockIdx.y, warp = threadIdx.x / 32;
  wait_for_predecessor();
  int2 range = slots[request];
  int count = range.y - range.x;
  i64 first = (i64)range.x * Q_HEADS + head;

  // The log-sum-exps, all at once: their maximum, then weights.
  float top = minus_infinity();
  for (int i = threadIdx.x; i < count; i += MERGE_THREADS) {
    float x = lse[first + (i64)i * Q_HEADS];
    weights[i] = x;
    top = fmaxf(top, x);
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
  if (threadIdx.x % 32 == 0) reduced[warp] = top;
  __syncthreads();
  for (float other : reduced) top = fmaxf(top, other);
  for (int i = threadIdx.x; i < count; i += MERGE_THREADS) {
    // fmaxf passes over a NaN, but the weight keeps it.
    float x = weights[i];
    weights[i] = x == minus_infinity() ? 0 : exp2_fast(x - top);
  }
  __syncthreads();

  int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  float4 sum = make_float4(0, 0, 0, 0);
  float total = 0;
#pragma unroll 8
  for (int i = row; i < count; i += ROWS) {
    float w = weights[i];
    float4 x = *(const float4*)(out + (first + (i64)i * Q_HEADS) * HEAD_DIM + 4 * lane);
    sum = make_float4(sum.x + w * x.x, sum.y + w * x.y, sum.z + w * x.z, sum.w + w * x.w);
    total += w;
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (lane == 0) weights[row] = total;
  __syncthreads();
  if (row > 0) return;
  for (int other = 1; other < ROWS; other++) {
    float4 x = sums[other][lane];
    sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    total += weights[other];
  }
  float inverse = count > 0 ? 1.0f / total : 0;
  u16* at = result + request * token_stride + head * head_stride + 4 * lane;
  *(uint2*)at = make_uint2(
      pack_halves<Q_BF16>(sum.x * inverse, sum.y * inverse), pack_halves<Q_BF16>(sum.z * inverse, sum.w * inverse));
}
