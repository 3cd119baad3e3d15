// What a block does, whatever its arithmetic is: decode.cu and verify.cu say how segments are attended to.
#pragma once

#include "book.cuh"
#include "copies.cuh"
#include "multiply.cuh"

// The share of a block's math warps: each kernel defines its own.
DEVICE void attend(float sm_scale, int batch, const Partials& partials, const Result& result, const Reading& reading,
                   const Plan& plan, char* shared);

// Results become those of whole requests, by the math warps of all blocks; ``with``: whom this block shares its first and
// its last with.
DEVICE void conclude(const Cut& cut, const Shared (&with)[2], int batch, const Partials& partials, const Result& result,
                     const Reading& reading, const Plan& plan, char* shared) {
  if constexpr (MULTIPLIES) multiply(cut, plan, batch, partials, result, reading, shared + STAGES_OFFSET);
  else merge(with, partials, result, shared + STAGES_OFFSET);
}

DEVICE void run_block(const Query& query, const Buffers& buffers, const Tables& tables, const Partials& partials,
                      const Result& result, const Reading& reading, const Books& books, char* shared) {
  u32 base = shared_address(shared);
  Plan& plan = *(Plan*)(shared + PLAN_OFFSET);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 16 + QUERY_BUFFERS; stage++) {
      barrier_init(full_barrier(base, stage), 1);
      barrier_init(empty_barrier(base, stage), MATH_WARPS);
    }
    if (HAS_BOOK) barrier_init(book_barrier(base), 1);
    barrier_init_done();
    if (HAS_BOOK) books.copy(base);
    if constexpr (MULTIPLIES) reading.ask();
  }
  make_plan(tables, plan);
  __syncthreads();
  if (threadIdx.x >= MATH_WARPS * 32) {
    if (REGISTERS_MOVE) give_registers<COPY_REGISTERS>();
    if (threadIdx.x / 32 == MATH_WARPS) {
      copy(query, tables, buffers, plan, base);
      if (HAS_BOOK) barrier_wait(book_barrier(base), 0);  // a block may not end before what is copied into it is there
      // Blocks without work too: what comes after this launch relies on what came before it.
      wait_for_predecessor();
      let_successor_start();
    }
  } else {
    if (REGISTERS_MOVE) take_registers<MATH_REGISTERS>();
    if (!MULTIPLIES) write_zeros(result, plan, tables.batch);
    attend(query.sm_scale, tables.batch, partials, result, reading, plan, shared);
  }
}
