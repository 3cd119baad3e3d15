// Codebooks of keys: an index of eight bits stands for a point of four channels.
//
// The points of all kv heads lie in shared memory from before the first stage until the end. A point is a word of four
// signed bytes, an operand of an integer tensor core. Lane c of a row looks up the points of groups 16 w + 4 c + j, byte j of
// its word w; the points of an index of its four lanes lie side by side, so those meet in no bank, and lanes of other rows
// in few.
#pragma once

#include "tile.cuh"

// Product u takes slots 2 u and 2 u + 1 of a lane: slot 4 w + j is byte j of word w.
DEVICE constexpr int group_of_slot(int slot, int c) { return slot / 4 * 16 + 4 * c + slot % 4; }

DEVICE u32 book_barrier(u32 shared) { return shared + BARRIERS_OFFSET + (16 + 2) * 16; }
DEVICE u32 book_address(u32 shared, int head) { return shared + BOOKS_OFFSET + head * BOOK_BYTES; }

struct Books {
  const u8* points;  // [KV_HEADS, BOOK_BYTES], in the order of cuda/books.py

  // By one thread. They never change, so the launch before this one may still run.
  DEVICE void copy(u32 shared) const {
    barrier_arrive_expect(book_barrier(shared), KV_HEADS * BOOK_BYTES);
    for (int head = 0; head < KV_HEADS; head++)
      bulk_copy(book_address(shared, head), points + head * BOOK_BYTES, BOOK_BYTES, book_barrier(shared));
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
    return load_shared(book + slot * 4096 + 16 * index);
  }
};
