// Requests that several blocks worked on: their partial results, weighted by their log-sum-exp, become one.
//
// The blocks of a request wait for each other at the end and then merge a slice of its channels each. All blocks of a
// launch are co-resident, one to a multiprocessor, so none waits for one that cannot start (decode.py refuses what would
// break that: other processes on the same multiprocessors); and their shares are equal, so none waits for long.
#pragma once

#include "partial.cuh"

constexpr int MATH_THREADS = MATH_WARPS * 32;
constexpr int EVERYONE = 15;  // the named barrier of all threads that calculate
constexpr int CHUNK = 4;      // channels that a thread merges
constexpr int CHUNKS = ROWS * HEAD_DIM / CHUNK;
constexpr u32 LEFT = 1 << 16;  // counters: arrivals in the low half, departures in the high half

struct Partial {
  float top, total;
  float4 sum;
};
static_assert(MATH_THREADS * sizeof(Partial) <= STAGES * STAGE_BYTES, "rows are exchanged where stages were");

DEVICE Partial nothing() { return {minus_infinity(), 0, make_float4(0, 0, 0, 0)}; }

// Many partial results become one; the total of an empty one is 0, a NaN is passed on.
template <int COUNT>
DEVICE Partial join(const Partial (&parts)[COUNT]) {
  Partial all = nothing();
#pragma unroll
  for (int i = 0; i < COUNT; i++) all.top = fmaxf(all.top, parts[i].top);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const Partial& part = parts[i];
    float weight = part.total == 0 ? 0 : exp2_fast(part.top - all.top);
    all.total += part.total * weight;
    all.sum = make_float4(all.sum.x + part.sum.x * weight, all.sum.y + part.sum.y * weight,
                          all.sum.z + part.sum.z * weight, all.sum.w + part.sum.w * weight);
  }
  return all;
}

// Another block has written it. ``chunk``: of a pass.
DEVICE Partial load_partial(const Partials& partials, int slot, int chunk) {
  float lse = load_from_others(partials.lse + slot * ROWS + chunk * CHUNK / HEAD_DIM);
  return {lse, lse == minus_infinity() ? 0.0f : 1.0f, load_from_others4(partials.out + ((i64)slot * CHUNKS + chunk) * CHUNK)};
}

// Where the partial results of a pass lie: one of every block that worked on it.
struct Parts {
  int pass, first_slot, blocks;

  DEVICE static Parts of(int pass, int cost_begin, int last_stage, const Cut& cut) {
    int first = cut.owner(cost_begin);
    return {pass, first + pass, cut.owner(last_stage) - first + 1};
  }
};

// A pass, and what this block does when others have worked on it too.
struct Shared {
  Parts parts;
  int begin, end;  // chunks that this block merges

  DEVICE static Shared of(const Segment& segment, const Cut& cut) {
    Parts parts = Parts::of(segment.request, segment.cost_begin, segment.last_stage, cut);
    int part = own_block() + parts.pass - parts.first_slot;
    return {parts, CHUNKS * part / parts.blocks, CHUNKS * (part + 1) / parts.blocks};
  }
  DEVICE bool none() const { return parts.blocks < 2; }
  DEVICE u32* counter(const Partials& partials) const { return partials.counters + parts.pass; }
};

// By all threads that calculate. ``rows`` is shared memory for a Partial of each; a thread asks for AHEAD partial results at
// once. ``parts_of`` says where those of a chunk are, if it is live, and which of its pass's chunks it is, ``take`` what
// becomes of the sum.
template <int AHEAD, class PartsOf, class Take>
DEVICE void merge_chunks(int begin, int end, const Partials& partials, Partial* rows, PartsOf parts_of, Take take) {
  int thread = threadIdx.x;
  // A power of two of threads side by side take neighbouring chunks; the others take other partial results of the same.
  int shift = min(32 - __clz(max(end - begin - 1, 0)), 31 - __clz(MATH_THREADS));
  int width = 1 << shift, row = thread >> shift, height = MATH_THREADS >> shift;
  for (int base = begin; base < end; base += width) {
    int chunk = base + (thread & (width - 1));
    bool live = row < height && chunk < end;  // a width may leave threads over
    int of_pass = 0;
    Parts parts = parts_of(chunk, live, of_pass);
    Partial sum = nothing();
    for (int i = row; i < parts.blocks; i += AHEAD * height) {
      Partial some[AHEAD + 1];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        some[k] = live && i + k * height < parts.blocks
                      ? load_partial(partials, parts.first_slot + i + k * height, of_pass) : nothing();
      some[AHEAD] = sum;
      sum = join(some);
    }
    for (int step = width; step < 32; step *= 2) {
      auto other = [&](float x) { return __shfl_xor_sync(FULL_WARP, x, step); };
      float4 x = make_float4(other(sum.sum.x), other(sum.sum.y), other(sum.sum.z), other(sum.sum.w));
      Partial two[2] = {sum, {other(sum.top), other(sum.total), x}};
      sum = join(two);
    }
    if (height > 1) {
      int copies = max(32 >> shift, 1);  // threads of a warp that now have the same
      named_barrier(EVERYONE, MATH_THREADS);
      rows[thread] = sum;
      named_barrier(EVERYONE, MATH_THREADS);
      if (row > 0) continue;
      for (int other = copies; other < height; other += 4 * copies) {
        Partial five[5] = {nothing(), nothing(), nothing(), nothing(), sum};
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (other + k * copies < height) five[k] = rows[(other + k * copies) * width + thread];
        sum = join(five);
      }
    }
    if (live) take(chunk, parts.pass, of_pass, sum);
  }
}

// By all threads that calculate: the chunks of this block.
DEVICE void merge_own(const Shared& shared, const Partials& partials, const Result& result, Partial* rows) {
  auto parts_of = [&](int chunk, bool, int& of_pass) {
    of_pass = chunk;
    return shared.parts;
  };
  merge_chunks<3>(shared.begin, shared.end, partials, rows, parts_of, [&](int, int pass, int chunk, const Partial& sum) {
    float inverse = sum.total == 0 ? 0 : 1.0f / sum.total;
    float x[CHUNK] = {sum.sum.x, sum.sum.y, sum.sum.z, sum.sum.w};
    result.write(pass, chunk * CHUNK / HEAD_DIM, chunk * CHUNK % HEAD_DIM, x, inverse);
    if (chunk * CHUNK % HEAD_DIM == 0) result.write_lse(pass, chunk * CHUNK / HEAD_DIM, sum.top, sum.total);
  });
}

// The end of a block that shares up to two requests, its first and its last.
DEVICE void merge(const Shared (&shared)[2], const Partials& partials, const Result& result, char* memory) {
  if (shared[0].none() && shared[1].none()) return;
  named_barrier(EVERYONE, MATH_THREADS);
  if (threadIdx.x == 0) {
    __threadfence();
#pragma unroll
    for (const Shared& with : shared)
      if (!with.none()) atomicAdd(with.counter(partials), 1);
#pragma unroll
    for (const Shared& with : shared)
      if (!with.none()) while ((load_acquire(with.counter(partials)) & (LEFT - 1)) < with.parts.blocks) {}
  }
  named_barrier(EVERYONE, MATH_THREADS);
  // Who leaves last makes the counter ready for the next launch; whether this block does is known after the merge.
  u32 left[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (threadIdx.x == 0 && !shared[i].none()) left[i] = atomicAdd(shared[i].counter(partials), LEFT) / LEFT + 1;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (shared[i].none()) continue;
    merge_own(shared[i], partials, result, (Partial*)memory);
    if (threadIdx.x == 0 && left[i] == shared[i].parts.blocks) *shared[i].counter(partials) = 0;
  }
}
