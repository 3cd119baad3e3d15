// Merge: the partial results of every request and query head, weighted by their log-sum-exp. Grid (Q_HEADS, batch).
#include "config.cuh"

constexpr int LANES = HEAD_DIM / 4;              // threads that cover a partial result, four channels each
constexpr int MERGE_THREADS = 256;
constexpr int ROWS = MERGE_THREADS / LANES;      // partial results read at a time

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) oscar_merge(
    const float* out, const float* lse, const int4* slots, u16* result, i64 token_stride, i64 head_stride) {
  __shared__ float peaks[ROWS];
  __shared__ float4 sums[ROWS][LANES];
  __shared__ float totals[ROWS];
  int head = blockIdx.x, request = blockIdx.y, row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  wait_for_predecessor();
  int4 range = slots[request];

  // Every row of threads merges each ROWS-th partial result, then one row merges the rows.
  float top = minus_infinity(), total = 0;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int slot = range.x + row; slot < range.y; slot += ROWS) {
    if (slot == range.z) continue;
    i64 at = (i64)slot * Q_HEADS + head;
    float weight = lse[at];
    float4 x = *(const float4*)(out + at * HEAD_DIM + 4 * lane);
    if (weight == minus_infinity()) continue;
    float peak = fmaxf(top, weight);
    float fade = exp2_fast(top - peak), w = exp2_fast(weight - peak);
    top = peak;
    total = total * fade + w;
    sum = make_float4(sum.x * fade + x.x * w, sum.y * fade + x.y * w, sum.z * fade + x.z * w, sum.w * fade + x.w * w);
  }
  if (lane == 0) {
    peaks[row] = top;
    totals[row] = total;
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0) return;
  for (int other = 1; other < ROWS; other++) top = fmaxf(top, peaks[other]);
  float x = 0, y = 0, z = 0, w = 0;
  total = 0;
  for (int other = 0; other < ROWS; other++) {
    float weight = totals[other] > 0 ? exp2_fast(peaks[other] - top) : 0;
    total += weight * totals[other];
    x += weight * sums[other][lane].x;
    y += weight * sums[other][lane].y;
    z += weight * sums[other][lane].z;
    w += weight * sums[other][lane].w;
  }
  float inverse = total > 0 ? 1.0f / total : (total == 0 ? 0.0f : total);  // NaN stays NaN
  u16* at = result + request * token_stride + head * head_stride + 4 * lane;
  *(uint2*)at = make_uint2(pack_halves<Q_BF16>(x * inverse, y * inverse), pack_halves<Q_BF16>(z * inverse, w * inverse));
}
