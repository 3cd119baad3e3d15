// Merge: the partial results of every request and query head, weighted by their log-sum-exp.
//
// Grid (Q_HEADS, batch, slices): a block merges HEAD_DIM / slices channels. Few requests have many partial results each and
// get four slices, so that all of them are read at once; many requests have few, and one slice does.
#include "config.cuh"

constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int MAX_SLOTS = 1024;  // of a request: at most one for each block of oscar_decode
constexpr int AHEAD = 8;         // partial results that a thread asks for before it knows any weight

extern "C" __global__ void __launch_bounds__(MERGE_THREADS) oscar_merge(
    const float* out, const float* lse, const int2* slots, u16* result, i64 token_stride, i64 head_stride) {
  __shared__ float weights[MAX_SLOTS];
  __shared__ float reduced[MERGE_WARPS];
  __shared__ float4 sums[MERGE_THREADS];
  __shared__ float totals[MERGE_THREADS];
  int head = blockIdx.x, request = blockIdx.y, warp = threadIdx.x / 32;
  int lanes = HEAD_DIM / 4 / gridDim.z, rows = MERGE_THREADS / lanes;  // four channels a thread
  int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  int channel = 4 * (blockIdx.z * lanes + lane);
  wait_for_predecessor();
  let_successor_start();
  int2 range = slots[request];
  int count = range.y - range.x;
  const float* first_lse = lse + (i64)range.x * Q_HEADS + head;
  const float* first_out = out + ((i64)range.x * Q_HEADS + head) * HEAD_DIM + channel;
  constexpr i64 STRIDE = (i64)Q_HEADS * HEAD_DIM;

  float4 ahead[AHEAD];
#pragma unroll
  for (int k = 0; k < AHEAD; k++)
    if (row + k * rows < count) ahead[k] = *(const float4*)(first_out + (row + k * rows) * STRIDE);
  float top = minus_infinity();
  for (int i = threadIdx.x; i < count; i += MERGE_THREADS) {
    weights[i] = first_lse[(i64)i * Q_HEADS];
    top = fmaxf(top, weights[i]);
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
  if (threadIdx.x % 32 == 0) reduced[warp] = top;
  __syncthreads();
  for (float other : reduced) top = fmaxf(top, other);

  float4 sum = make_float4(0, 0, 0, 0);
  float total = 0;
  auto add = [&](int i, float4 x) {
    // fmaxf passes over a NaN, but the weight keeps it.
    float w = weights[i] == minus_infinity() ? 0 : exp2_fast(weights[i] - top);
    sum = make_float4(sum.x + w * x.x, sum.y + w * x.y, sum.z + w * x.z, sum.w + w * x.w);
    total += w;
  };
#pragma unroll
  for (int k = 0; k < AHEAD; k++)
    if (row + k * rows < count) add(row + k * rows, ahead[k]);
  for (int i = row + AHEAD * rows; i < count; i += rows) add(i, *(const float4*)(first_out + i * STRIDE));
  sums[threadIdx.x] = sum;
  totals[threadIdx.x] = total;
  for (int half = rows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
      int other = threadIdx.x + half * lanes;
      float4 x = sums[other];
      sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      total += totals[other];
      sums[threadIdx.x] = sum;
      totals[threadIdx.x] = total;
    }
  }
  if (row > 0) return;
  float inverse = count > 0 ? 1.0f / total : 0;
  u16* at = result + request * token_stride + head * head_stride + channel;
  *(uint2*)at = make_uint2(
      pack_halves<Q_BF16>(sum.x * inverse, sum.y * inverse), pack_halves<Q_BF16>(sum.z * inverse, sum.w * inverse));
}
