// Decode attention over a layer that is cut by kv head into two parts: the first blocks of a launch work on one part, the
// others on the other. Two launches take twice what a short one does, as the second waits for all blocks of the first.
//
// Parts have their own queries, tables, workspaces and counters, and know nothing of each other: each does what a launch of
// as many blocks would do. pair.py puts decode.cu with the constants of each, in a namespace, in the place of the two
// includes.
#include "ptx.cuh"

// Blocks that work on the first part.
DEVICE int& first_blocks() {
  __shared__ int blocks;
  return blocks;
}

#include "first"
#include "second"

extern "C" __global__ void __launch_bounds__(first::THREADS, 1) oscar_decode_pair(
    first::Query a_query, first::Buffers a_buffers, first::Tables a_tables, first::Partials a_partials,
    first::Result a_result, first::Reading a_reading, first::Books a_books, second::Query b_query,
    second::Buffers b_buffers, second::Tables b_tables, second::Partials b_partials, second::Result b_result,
    second::Reading b_reading, second::Books b_books, int split) {
  static_assert(first::THREADS == second::THREADS && first::MATH_WARPS == second::MATH_WARPS, "a block has one size");
  if (threadIdx.x == 0) first_blocks() = split;
  __syncthreads();
  if ((int)blockIdx.x < split) first::run(a_query, a_buffers, a_tables, a_partials, a_result, a_reading, a_books);
  else second::run(b_query, b_buffers, b_tables, b_partials, b_result, b_reading, b_books);
}
