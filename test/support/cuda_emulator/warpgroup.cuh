// The kernels' warpgroup.cuh for a CPU. A product of four warps is one of each: it is done at once, so what is touched while
// it would run on a GPU is not found here.
#pragma once

#include "ptx.cuh"

inline void store_shared(u32 address, u32 x) {
  if (address % 4) emulator::fail("a store to shared memory is not aligned");
  std::memcpy(emulated_shared() + address, &x, 4);
}
inline void store_shared4(u32 address, uint4 x) {
  if (address % 16) emulator::fail("a store to shared memory is not aligned");
  std::memcpy(emulated_shared() + address, &x, 16);
}

template <bool TRANSPOSED>
inline void emulated_load_matrices(u32 (&x)[4], u32 address) {
  if (address % 16) emulator::fail("a row of a matrix is not aligned");
  u32 give[1] = {address};
  char* shared = emulated_shared();
  emulator::exchange(40 + TRANSPOSED, give, x, [&](emulator::Warp& warp) {
    for (int l = 0; l < 32; l++)
      for (int m = 0; m < 4; m++) {
        u32 word = 0;
        for (int e = 0; e < 2; e++) {
          int row = TRANSPOSED ? 2 * (l % 4) + e : l / 4, column = TRANSPOSED ? l / 4 : 2 * (l % 4) + e;
          u16 element;
          std::memcpy(&element, shared + warp.given()[8 * m + row][0] + 2 * column, 2);
          word |= (u32)element << (16 * e);
        }
        warp.taken()[l][m] = word;
      }
  });
}
inline void load_matrices(u32 (&x)[4], u32 address) { emulated_load_matrices<false>(x, address); }
inline void load_transposed(u32 (&x)[4], u32 address) { emulated_load_matrices<true>(x, address); }
inline void store_matrices(u32 address, const u32 (&x)[4]) {
  if (address % 16) emulator::fail("a row of a matrix is not aligned");
  u32 give[5] = {address, x[0], x[1], x[2], x[3]}, take[1];
  char* shared = emulated_shared();
  emulator::exchange(42, give, take, [&](emulator::Warp& warp) {
    for (int l = 0; l < 32; l++)
      for (int m = 0; m < 4; m++)
        std::memcpy(shared + warp.given()[8 * m + l / 4][0] + 4 * (l % 4), &warp.given()[l][1 + m], 4);
  });
}
inline void show_to_products() {}

inline bool barrier_any(u32 id, u32 threads, bool x) {
  emulator::Gate& gate = emulator::now->block->gates[id];
  u32& mine = gate.any[gate.done % 2];
  if (gate.arrived == 0) mine = 0;
  mine |= x;
  emulator::gate(id, (int)threads);
  return mine != 0;
}

inline u32 multiply_halves(u32 x, u32 y) {
  return pack_half(low_half<false>(x) * low_half<false>(y), high_half<false>(x) * high_half<false>(y));
}

inline void products_commit() {}
template <int LEFT>
inline void products_wait() {}
inline void settled(float&) {}
inline void settled(u32&) {}
inline u32 matrix_at(u32 address, int leading) {
  if (address % 16) emulator::fail("a matrix is not aligned");
  return address >> 4 | (u32)(leading >> 4) << 16;
}
template <bool TRANSPOSED, bool MORE>
inline void product(float (&c)[16], const u32 (&a)[4], u32 matrix) {
  u32 at = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4;
  if (!MORE) std::memset(c, 0, sizeof c);
  int column = emulator::now->lane / 4, k = 2 * (emulator::now->lane % 4);
  for (int j = 0; j < 4; j++) {
    u32 b[2];
    for (int half = 0; half < 2; half++) {
      u32 block = at + half * leading + j * 128;
      b[half] = TRANSPOSED ? load_shared_u16(block + k * 16 + column * 2) | load_shared_u16(block + (k + 1) * 16 + column * 2) << 16
                           : load_shared(block + column * 16 + k * 2);
    }
    mma_k16<false>(*(float(*)[4])(c + 4 * j), a[0], a[1], a[2], a[3], b[0], b[1]);
  }
}
