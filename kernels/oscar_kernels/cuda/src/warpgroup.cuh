// Instructions of kernels whose products are of four warps side by side. The emulator has others in their place.
#pragma once

#include "ptx.cuh"

// ---- shared memory -------------------------------------------------------------------------------------------------
DEVICE void store_shared(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
DEVICE void store_shared4(u32 address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Four 8x8 matrices of 16-bit elements, lane l gives where row l % 8 of matrix l / 8 lies and gets elements
// (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of each, or of its transpose.
DEVICE void load_matrices(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void load_transposed(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
DEVICE void store_matrices(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3]) : "memory");
}
// What this thread has stored is seen by products that begin behind the next barrier.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for the threads of one of the hardware's barriers; whether any of them brought true.
DEVICE bool barrier_any(u32 id, u32 threads, bool x) {
  u32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.aligned.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any) : "r"(id), "r"(threads), "r"((u32)x) : "memory");
  return any != 0;
}

// ---- numbers -------------------------------------------------------------------------------------------------------
DEVICE u32 multiply_halves(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// ---- products ------------------------------------------------------------------------------------------------------
// Products run beside other instructions from products_commit() to products_wait(), which leaves the LEFT newest groups of
// them running. Until then nothing may touch their sums; settled() says that something may from here on, and keeps operands
// from being made after products_begin().
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
DEVICE void settled(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void settled(u32& x) { asm volatile("" : "+r"(x)::"memory"); }

// The low word of what describes a matrix in shared memory: its address, and bytes from eight of depth to the next eight.
DEVICE u32 matrix_at(u32 address, int leading) { return (address & 0x3ffff) >> 4 | (u32)(leading >> 4) << 16; }

// c[64x32] += a[64x16] * b[16x32], float16, or c = a * b without MORE. A warp has 16 rows of a and c, as in mma_k16 with
// c[4 j ...] of columns 8 j and on. b is of blocks of eight columns by eight of depth, 128 bytes each: TRANSPOSED has the
// eight columns of one of depth side by side, else eight of depth of a column are; four blocks of columns follow each other.
template <bool TRANSPOSED, bool MORE>
DEVICE void product(float (&c)[16], const u32 (&a)[4], u32 matrix) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 m;\nsetp.ne.b32 p, %21, 0;\nmov.b64 m, {%20, %23};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, m, p, 1, 1, %22;\n}"
      : OSCAR_C4(0), OSCAR_C4(4), OSCAR_C4(8), OSCAR_C4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(matrix), "n"((int)MORE), "n"((int)TRANSPOSED), "r"(128 >> 4));
}
