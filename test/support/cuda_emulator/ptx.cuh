// The CUDA kernels' ptx.cuh for a CPU: every thread of a launch is a fiber, what warps and blocks do together is done when
// the last of them has come, copies are done at once. Blocks of a launch are all there at the same time, as the decode
// kernel needs them. What this leaves out: timing, memory order, and the latency of copies.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)

constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 FULL_WARP = 0xffffffffu;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline u32 max(u32 a, u32 b) { return a < b ? b : a; }

// ---- fibers ---------------------------------------------------------------------------------------------------------
namespace emulator {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda emulator: %s\n", what);
  std::abort();
}

struct Dim {
  u32 x, y, z;
};

struct Warp {
  u32 brought[2][32][8];  // what lanes bring to an operation, and to the next: some may be there before all have taken
  u32 results[2][32][4];
  int arrived = 0, kind = 0;
  u32 done = 0;  // operations

  u32 (&given())[32][8] { return brought[done % 2]; }
  u32 (&taken())[32][4] { return results[done % 2]; }
};

struct Mbarrier {
  int expected = 0, pending = 0;
  i64 bytes = 0;
  u32 phase = 0;

  void settle() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = expected;
    }
  }
};

struct Gate {
  int arrived = 0;
  u32 done = 0;
  u32 any[2];  // of this time and the next: some may be there before all have read
};

struct Block {
  std::vector<char> memory;
  char* shared = nullptr;
  std::map<u32, Mbarrier> mbarriers;
  std::map<u32, Gate> gates;
  std::vector<Warp> warps;
};


struct Thread {
  Dim index, block_index;
  Block* block;
  Warp* warp;
  int lane;
  bool begun = false, finished = false;
  const u32* watched = nullptr;  // it waits until this is no longer ``seen``
  u32 seen = 0;
  ucontext_t beginning;
  jmp_buf rest;
};

inline Thread* now = nullptr;
inline jmp_buf scheduler;
inline Dim grid, size;
inline u64 progress = 0;  // counts what others may wait for

// Jumps, as ucontext would ask the kernel for signal masks at every switch.
inline void yield() {
  if (!_setjmp(now->rest)) _longjmp(scheduler, 1);
}

inline void wait_while(const u32& watched, u32 seen) {
  now->watched = &watched, now->seen = seen;
  while (watched == seen) yield();
  now->watched = nullptr;
}

__attribute__((noinline)) inline void resume(Thread& thread) {
  now = &thread;
  if (_setjmp(scheduler)) return;
  if (thread.begun) _longjmp(thread.rest, 1);
  thread.begun = true;
  setcontext(&thread.beginning);
}

// Runs ``act`` once every lane of the warp has come, then lets them go on.
template <class Act>
inline void collective(int kind, Act act) {
  Warp& warp = *now->warp;
  if (warp.arrived == 0) warp.kind = kind;
  if (warp.kind != kind) fail("lanes of a warp are in different collective operations");
  u32 mine = warp.done;
  if (++warp.arrived == 32) {
    act(warp);
    warp.arrived = 0;
    warp.done++;
    progress++;
  } else {
    wait_while(warp.done, mine);
  }
}

// The same for some threads of a block.
inline void gate(u32 id, int threads) {
  Gate& gate = now->block->gates[id];
  u32 mine = gate.done;
  if (++gate.arrived == threads) {
    gate.arrived = 0;
    gate.done++;
    progress++;
  } else {
    wait_while(gate.done, mine);
  }
}

// What collective operations exchange; ``give`` and ``take`` are 32-bit words.
template <int GIVE, int TAKE, class Act>
inline void exchange(int kind, const u32 (&give)[GIVE], u32 (&take)[TAKE], Act act) {
  Warp& warp = *now->warp;
  auto& taken = warp.taken()[now->lane];
  std::memcpy(warp.given()[now->lane], give, sizeof give);
  collective(kind, act);
  std::memcpy(take, taken, sizeof take);
}

template <class Kernel>
void enter(u32 high, u32 low) {
  const Kernel& kernel = *(const Kernel*)(uintptr_t)((u64)high << 32 | low);
  kernel();
  now->finished = true;
  progress++;
  yield();
}

// Warps do not keep pace: now and then one rests for a while, so that what others need of it must be waited for.
constexpr u32 NAP = 64;  // rounds
inline bool sleeps(u32 round, u32 warp) {
  u32 mixed = (round / NAP * 0x9e3779b9u) ^ (warp * 0x85ebca6bu);
  mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
  return (mixed >> 16) % 4 == 0;
}

template <class Kernel>
void launch(int blocks, int threads, int shared_bytes, char* stacks, size_t stack_bytes, const Kernel& kernel) {
  grid = {(u32)blocks, 1, 1}, size = {(u32)threads, 1, 1};
  std::vector<Block> all(blocks);
  std::vector<Thread> fibers((size_t)blocks * threads);
  for (int b = 0; b < blocks; b++) {
    Block& block = all[b];
    block.memory.assign(shared_bytes + 65536 + 1024, (char)0xFF);  // NaN in every format
    block.shared = (char*)(((uintptr_t)block.memory.data() + 1023) / 1024 * 1024);
    block.warps.resize(threads / 32);
    for (int t = 0; t < threads; t++) {
      size_t number = (size_t)b * threads + t;
      Thread& thread = fibers[number];
      thread.index = {(u32)t, 0, 0}, thread.block_index = {(u32)b, 0, 0};
      thread.block = &block, thread.warp = &block.warps[t / 32], thread.lane = t % 32;
      getcontext(&thread.beginning);
      thread.beginning.uc_stack.ss_sp = stacks + number * stack_bytes;
      thread.beginning.uc_stack.ss_size = stack_bytes;
      thread.beginning.uc_link = nullptr;
      u64 at = (u64)(uintptr_t)&kernel;
      makecontext(&thread.beginning, (void (*)())enter<Kernel>, 2, (u32)(at >> 32), (u32)at);
    }
  }
  int idle = 0;
  for (u32 round = 0, left = fibers.size(); left > 0; round++) {
    u64 before = progress;
    for (size_t f = 0; f < fibers.size(); f++) {
      Thread& fiber = fibers[f];
      if (fiber.finished || (fiber.watched && *fiber.watched == fiber.seen) || sleeps(round, f / 32)) continue;
      resume(fiber);
      if (fiber.finished) left--;
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > 100 * NAP) fail("all threads wait for each other");
  }
  now = nullptr;
}

}  // namespace emulator

#define threadIdx (emulator::now->index)
#define blockIdx (emulator::now->block_index)
#define gridDim (emulator::grid)
#define blockDim (emulator::size)

inline char* emulated_shared() { return emulator::now->block->shared; }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - emulator::now->block->shared); }

// ---- the language ---------------------------------------------------------------------------------------------------
template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline u32 __float_as_uint(float x) { return bits_of<u32>(x); }
inline float __uint_as_float(u32 x) { return bits_of<float>(x); }
inline float as_float(u32 x) { return bits_of<float>(x); }
inline float minus_infinity() { return -INFINITY; }
inline float __int2float_rn(int x) { return (float)x; }
inline int __float2int_rn(float x) {
  float y = nearbyintf(x);
  return y != y ? 0 : y >= 2147483648.0f ? 2147483647 : y < -2147483648.0f ? (int)0x80000000 : (int)y;
}
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((u32)x); }
inline u32 __funnelshift_l(u32 low, u32 high, u32 shift) { return (u32)(((u64)high << 32 | low) << (shift & 31) >> 32); }
inline u32 __byte_perm(u32 x, u32 y, u32 select) {
  u64 bytes = (u64)y << 32 | x;
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 pick = select >> (4 * i) & 15;
    u32 byte = (u32)(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
inline void __threadfence() {}
inline u32 atomicAdd(u32* p, u32 x) {
  u32 old = *p;
  *p = old + x;
  emulator::progress++;
  return old;
}
inline void __syncwarp() { emulator::collective(1, [](emulator::Warp&) {}); }
inline void __syncthreads() { emulator::gate(~0u, (int)blockDim.x); }

// One word from each lane; ``act`` says what lane ``l`` gets.
template <class Word, class Act>
inline Word across(int kind, Word x, Act act) {
  u32 give[1] = {bits_of<u32>(x)}, take[1];
  emulator::exchange(kind, give, take, [&](emulator::Warp& warp) {
    for (int l = 0; l < 32; l++) warp.taken()[l][0] = act(warp, l);
  });
  return bits_of<Word>(take[0]);
}
template <class Word>
inline Word __shfl_xor_sync(u32, Word x, int step) {
  emulator::now->warp->given()[emulator::now->lane][1] = (u32)step;
  return across(2, x, [](emulator::Warp& warp, int l) { return warp.given()[l ^ warp.given()[l][1]][0]; });
}
template <class Word>
inline Word __shfl_sync(u32, Word x, int from) {
  emulator::now->warp->given()[emulator::now->lane][1] = (u32)from % 32;
  return across(3, x, [](emulator::Warp& warp, int l) { return warp.given()[warp.given()[l][1]][0]; });
}
template <class Word>
inline Word __shfl_up_sync(u32, Word x, int step) {
  emulator::now->warp->given()[emulator::now->lane][1] = (u32)step;
  return across(4, x, [](emulator::Warp& warp, int l) {
    int from = l - (int)warp.given()[l][1];
    return warp.given()[from < 0 ? l : from][0];
  });
}
inline u32 __ballot_sync(u32, bool x) {
  return across(5, (u32)x, [](emulator::Warp& warp, int) {
    u32 out = 0;
    for (int l = 0; l < 32; l++) out |= (u32)(warp.given()[l][0] != 0) << l;
    return out;
  });
}
inline bool __any_sync(u32 mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(u32 mask, bool x) { return __ballot_sync(mask, !x) == 0; }
inline u32 __reduce_max_sync(u32, u32 x) {
  return across(6, x, [](emulator::Warp& warp, int) {
    u32 out = 0;
    for (int l = 0; l < 32; l++) out = max(out, warp.given()[l][0]);
    return out;
  });
}

// ---- loads ----------------------------------------------------------------------------------------------------------
template <class Word>
inline Word emulated_load(u32 address) {
  if (address % sizeof(Word)) emulator::fail("a load from shared memory is not aligned");
  Word x;
  std::memcpy(&x, emulator::now->block->shared + address, sizeof x);
  return x;
}
inline u32 load_shared_u16(u32 address) { return emulated_load<u16>(address); }
inline u32 load_shared(u32 address) { return emulated_load<u32>(address); }
inline uint2 load_shared2(u32 address) { return emulated_load<uint2>(address); }
inline uint4 load_shared4(u32 address) { return emulated_load<uint4>(address); }
inline void store_shared2(u32 address, u32 x, u32 y) {
  if (address % 8) emulator::fail("a store to shared memory is not aligned");
  u32 words[2] = {x, y};
  std::memcpy(emulator::now->block->shared + address, words, sizeof words);
}
inline float4 load_again4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline float load_from_others(const float* p) { return *p; }
inline float4 load_from_others4(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline u32 load_acquire(const u32* p) {
  emulator::yield();
  return *(const volatile u32*)p;
}

// ---- numbers --------------------------------------------------------------------------------------------------------
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }
inline float exp2_fast(float x) { return flushed(exp2f(flushed(x))); }
inline float log2_fast(float x) { return log2f(x); }
inline float add_toward_zero(float x, float y) {
  double sum = (double)x + (double)y;
  float near = (float)sum;
  return fabs((double)near) > fabs(sum) ? nextafterf(near, 0) : near;
}
inline float add_toward_minus_infinity(float x, float y) {
  double sum = (double)x + (double)y;
  float near = (float)sum;
  return (double)near > sum ? nextafterf(near, -INFINITY) : near;
}
inline u16 emulated_half(float x) { return bits_of<u16>((_Float16)x); }
inline u16 emulated_bfloat(float x) {
  u32 bits = bits_of<u32>(x);
  if (x != x) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float half_to_float(u32 bits) { return (float)bits_of<_Float16>((u16)bits); }
inline u32 pack_half(float low, float high) { return emulated_half(low) | (u32)emulated_half(high) << 16; }
inline u32 pack_bfloat(float low, float high) { return emulated_bfloat(low) | (u32)emulated_bfloat(high) << 16; }
inline u32 choose_bytes(u32 low, u32 high, u32 which) {
  u64 bytes = low | (u64)high << 32;
  u32 y = 0;
  for (int i = 0; i < 4; i++) y |= (u32)(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return y;
}
template <bool BF16>
inline float low_half(u32 word) { return BF16 ? as_float(word << 16) : half_to_float(word & 0xffffu); }
template <bool BF16>
inline float high_half(u32 word) { return BF16 ? as_float(word & 0xffff0000u) : half_to_float(word >> 16); }
template <bool BF16>
inline u32 pack_halves(float low, float high) { return BF16 ? pack_bfloat(low, high) : pack_half(low, high); }

// ---- tensor cores ---------------------------------------------------------------------------------------------------
// Fragments as the PTX manual lays them out: lane l has row l / 4 (and that plus 8), columns from those of l % 4 on.
template <bool SIGNED, bool POINTS = false>
inline void emulated_mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u32 give[6] = {a0, a1, a2, a3, b0, b1}, take[4];
  emulator::exchange(POINTS ? 9 : SIGNED ? 7 : 8, give, take, [](emulator::Warp& warp) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        int row = l / 4, half = i / 2, column = 2 * (l % 4) + i % 2, sum = 0;
        for (int k = 0; k < 32; k++) {
          int word = k / 16, from = k % 16 / 4, shift = 8 * (k % 4);
          int a = (int)(warp.given()[4 * row + from][2 * word + half] >> shift & 0xff);
          u32 byte = warp.given()[4 * column + from][4 + word] >> shift & 0xff;
          sum += (POINTS ? (int)(signed char)a : a) * (SIGNED ? (int)(signed char)byte : (int)byte);
        }
        warp.taken()[l][i] = (u32)sum;
      }
  });
  for (int i = 0; i < 4; i++) c[i] += (int)take[i];
}
inline void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulated_mma_bytes<false>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma_codes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulated_mma_bytes<true>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma_points(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulated_mma_bytes<true, true>(c, a0, a1, a2, a3, b0, b1);
}
template <bool BF16>
inline float emulated_element(u32 word, int index) { return index ? high_half<BF16>(word) : low_half<BF16>(word); }
template <bool BF16, int DEPTH>
inline void emulated_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  u32 give[6] = {a0, a1, a2, a3, b0, b1}, take[4];
  emulator::exchange(DEPTH + BF16, give, take, [](emulator::Warp& warp) {
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++) {
        int row = l / 4, half = i / 2, column = 2 * (l % 4) + i % 2;
        double sum = 0;
        for (int k = 0; k < DEPTH; k++) {
          int word = k / 8, from = k % 8 / 2;
          sum += (double)emulated_element<BF16>(warp.given()[4 * row + from][2 * word + half], k % 2) *
                 (double)emulated_element<BF16>(warp.given()[4 * column + from][4 + word], k % 2);
        }
        warp.taken()[l][i] = bits_of<u32>((float)sum);
      }
  });
  for (int i = 0; i < 4; i++) c[i] += bits_of<float>(take[i]);
}
template <bool BF16>
inline void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emulated_mma<BF16, 16>(c, a0, a1, a2, a3, b0, b1);
}
inline void mma_half(float (&d)[4], const float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  std::memcpy(d, c, sizeof d);
  emulated_mma<false, 16>(d, a[0], a[1], a[2], a[3], b0, b1);
}
template <bool BF16>
inline void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  emulated_mma<BF16, 8>(c, a0, a1, 0, 0, b0, 0);
}
inline u32 transpose_8x8(u32 x) {
  return across(30, x, [](emulator::Warp& warp, int l) {
    auto element = [&](int row, int column) { return warp.given()[4 * row + column / 2][0] >> (16 * (column % 2)) & 0xffffu; };
    return element(2 * (l % 4), l / 4) | element(2 * (l % 4) + 1, l / 4) << 16;
  });
}

inline void products_begin() {}
inline void products_end() {}
template <bool BF16>
inline void mma_wide(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, bool more) {
  if (!more) std::memset(c, 0, sizeof c);
  for (int j = 0; j < 16; j++) {
    u32 at = b + 16 * (8 * j + emulator::now->lane / 4) + 4 * (emulator::now->lane % 4);
    mma_k16<BF16>(*(float(*)[4])(c + 4 * j), a0, a1, a2, a3, load_shared(at), load_shared(at + 16 * 128));
  }
}

// ---- barriers and bulk copies ---------------------------------------------------------------------------------------
inline emulator::Mbarrier& emulated_barrier(u32 address) {
  auto found = emulator::now->block->mbarriers.find(address);
  if (found == emulator::now->block->mbarriers.end()) emulator::fail("a barrier was not initialized");
  return found->second;
}
inline void barrier_init(u32 barrier, u32 arrivals) {
  emulator::now->block->mbarriers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_arrive(u32 barrier) {
  emulator::Mbarrier& found = emulated_barrier(barrier);
  if (--found.pending < 0) emulator::fail("more arrivals than a barrier expects");
  found.settle();
  emulator::progress++;
}
inline void barrier_arrive_expect(u32 barrier, u32 bytes) {
  emulated_barrier(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u32 barrier, u32 parity) {
  emulator::wait_while(emulated_barrier(barrier).phase, parity);
}
inline void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
  if (destination % 16 || (uintptr_t)source % 16 || bytes % 16 || bytes == 0) emulator::fail("a bulk copy is not of 16-byte words");
  std::memcpy(emulator::now->block->shared + destination, source, bytes);
  emulator::Mbarrier& found = emulated_barrier(barrier);
  found.bytes -= bytes;
  found.settle();
  emulator::progress++;
}
inline u64 read_once_policy() { return 0; }
inline void bulk_copy_once(u32 destination, const void* source, u32 bytes, u32 barrier, u64) {
  bulk_copy(destination, source, bytes, barrier);
}
inline void prefetch_bulk(const void* source, u32 bytes) {
  if ((uintptr_t)source % 16 || bytes % 16 || bytes == 0) emulator::fail("what is prefetched is not of 16-byte words");
}
inline void named_barrier(u32 id, u32 threads) { emulator::gate(id, (int)threads); }

// ---- what has no meaning here ---------------------------------------------------------------------------------------
template <int COUNT>
inline void take_registers() {}
template <int COUNT>
inline void give_registers() {}
inline void wait_for_predecessor() {}
inline void let_successor_start() {}
