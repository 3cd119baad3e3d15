// Codebooks of keys: an index of eight bits stands for a point of four channels.
//
// The points of all kv heads lie in shared memory from before the first stage until the end. A point is a word of four
// signed bytes, an operand of an integer tensor core. Lane c of a row looks up the points of groups 16 w + 4 c + j, byte j of
// its word w; the points of an index of its four lanes lie side by side, so those meet in no bank, and lanes of other rows
// in few. Of a book that all heads and groups share every lane has a copy in a bank of its own.
#pragma once

#include "tile.cuh"

// Product u takes slots 2 u and 2 u + 1 of a lane: slot 4 w + j is byte j of word w.
DEVICE constexpr int group_of_slot(int slot, int c) { return slot / 4 * 16 + 4 * c + slot % 4; }

DEVICE u32 book_barrier(u32 shared) { return shared + BARRIERS_OFFSET + (16 + 2) * 16; }
// This lane's points of a kv head.
DEVICE u32 points_address(u32 shared, int head) {
  int lane = threadIdx.x % 32;
  return shared + BOOKS_OFFSET + (SHARED_BOOK ? lane : head * (POINT_BYTES / 4) + lane % 4) * 4;
}
DEVICE u32 factors_address(u32 shared, int head) { return shared + BOOKS_OFFSET + FACTORS_OFFSET + head * HEAD_DIM; }

struct Books {
  const u8* points;  // [BOOK_BYTES], in the order of cuda/books.py

  // By one thread. They never change, so the launch before this one may still run.
  DEVICE void copy(u32 shared) const {
    constexpr int SIZE = 1 << 15;
    barrier_arrive_expect(book_barrier(shared), BOOK_BYTES);
    for (int at = 0; at < BOOK_BYTES; at += SIZE)
      bulk_copy(shared + BOOKS_OFFSET + at, points + at, min(SIZE, BOOK_BYTES - at), book_barrier(shared));
  }
};

// The indexes of 16 tokens, this lane's words of the rows of two of them, eight apart, and what they stand for.
struct BookWords {
  static constexpr int WORDS = HEAD_DIM / 64;
  u32 words[WORDS][2];
  u32 book;

  DEVICE void load(const Lane& lane, u32 tile) {
    book = lane.book;
#pragma unroll
    for (int word = 0; word < WORDS; word++)
#pragma unroll
      for (int row = 0; row < 2; row++) words[word][row] = load_word<KeyRows>(tile + 8 * row * KeyRows::ROW_BYTES + 16 * word);
  }

  DEVICE u32 operand(int unit, int row, int half) const {
    int slot = 2 * unit + half;
    u32 index = words[slot / 4][row] >> 8 * (slot % 4) & 0xff;
    return load_shared(SHARED_BOOK ? book + 128 * index : book + slot * 4096 + 16 * index);
  }
};
