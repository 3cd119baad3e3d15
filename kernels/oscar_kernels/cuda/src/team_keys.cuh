// Products of four warps with quantized keys: 64 tokens by 32 columns, which are query heads of one token after the other.
//
// Codes are operands in registers, 16 bits each, masked but not moved: a code at bits n.. of a half is the subnormal float16
// number code 2^n 2^-24, which tensor cores multiply exactly. Queries, in shared memory, are float16 numbers times a power
// of two, so those of bfloat16 lose nothing; they are divided by the 2^n of their channel.
#pragma once

#include "plan.cuh"
#include "warpgroup.cuh"

constexpr int OWN = PRODUCT_COLUMNS / 4;   // columns that a lane has a number of, for each of two tokens
constexpr int SUMS = PRODUCT_COLUMNS / 2;  // of a lane in a product
constexpr int WORDS = 4;                   // of a lane's codes in a row: one of every plane is an operand of a product
constexpr int DEPTH = 16;                  // channels, or tokens, of a product
constexpr int DEPTH_BYTES = DEPTH * PRODUCT_COLUMNS * 2;
constexpr float SUBNORMAL = 16777216.0f;   // 2^24
static_assert(!WARPGROUPS || (TILES_PER_STAGE == 4 && HEAD_DIM == 256 && K_GROUPS == 2 && V_GROUPS == 2 &&
                              KeyRows::HAS_ZERO && ValueRows::HAS_ZERO && KeyRows::BITS < 4 && ValueRows::BITS == 2 &&
                              SCALE_BYTES == 2 && Q_BF16 == WINDOW_BF16), "variant.py says something else");

// A lane's column: k = 2 j + i is column i of its two of the eight columns from 8 j on.
DEVICE int column_of(int k) { return 8 * (k / 2) + 2 * ((int)threadIdx.x % 4) + k % 2; }
// Which of a lane's columns a sum of a product belongs to.
DEVICE constexpr int owner(int sum) { return sum / 4 * 2 + sum % 2; }

// The four warps of a kv head, and what they have in shared memory.
struct Team {
  int head, warp, lane;
  u32 columns, weights, own;
  float unit;  // what one of a product with keys adds to a log2 weight, once multiplied by the scale

  DEVICE explicit Team(u32 base) {
    int number = __shfl_sync(FULL_WARP, (int)(threadIdx.x / 32), 0);
    head = number / 4, warp = number % 4, lane = threadIdx.x % 32;
    columns = base + DIGITS_OFFSET + head * DIGIT_BYTES;
    weights = columns + COLUMN_BYTES;
    own = base + head * TEAM_BYTES;
  }
  DEVICE u32 query_sums(int group) const { return own + group * 128; }  // of a group's channels, column after column
  DEVICE u32 exchange(int of) const { return own + 256 + of * 128; }    // a number of every column
  DEVICE u32 largest() const { return own + 256 + 512; }                // one of every warp
  DEVICE u32 barrier() const { return 1 + head; }
  DEVICE void meet() const { named_barrier(barrier(), 128); }

  // Over all lanes of all warps.
  DEVICE float largest_of_all(float x) const {
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    if (lane == 0) store_shared(largest() + 4 * warp, __float_as_uint(x));
    meet();
    for (int w = 0; w < 4; w++) x = fmaxf(x, as_float(load_shared(largest() + 4 * w)));
    meet();
    return x;
  }
  DEVICE void load(u32 q, float sm_scale);
};

// The first of the four neighbouring channels of a plane that lane l % 4 = c has in a word.
DEVICE int channel_of_word(int word, int c) {
  return KeyRows::BITS == 2 ? 16 * word + 4 * c : word / 2 * 32 + 8 * c + 4 * (word % 2);
}

// Queries, from shared memory where heads lie side by side, as columns of products. Warp w has plane w, lane l column l.
DEVICE void Team::load(u32 q, float sm_scale) {
  bool live = lane < COLUMNS;
  u32 row = q + (live ? lane : 0) * HEAD_DIM * 2 + warp * KeyRows::WIDTH * 2;
  float peak = 1e-30f, sum = 0;
  for (int i = 0; i < KeyRows::WIDTH / 8; i++) {
    uint4 eight = load_shared4(row + (i + lane) % (KeyRows::WIDTH / 8) * 16);  // in an order that shares no bank
    u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    for (u32 word : words) {
      float x = low_half<Q_BF16>(word), y = high_half<Q_BF16>(word);
      peak = fmaxf(peak, fmaxf(fabsf(x), fabsf(y)));
      sum += x + y;
    }
  }
  // All columns have one unit. One that is infinite spoils no other, nor do sums above the largest number.
  peak = largest_of_all(live && peak < 1e38f ? peak : 1e-30f);
  int exponent = (int)(__float_as_uint(peak) >> 23);  // peak < 2^(exponent - 126), which 2^14 stands for
  float factor = as_float((u32)(267 - exponent) << 23);
  unit = sm_scale * LOG2_E / factor * SUBNORMAL;
  store_shared(exchange(warp) + 4 * lane, __float_as_uint(live ? sum * (factor / SUBNORMAL) : 0));
  meet();
  if (warp < K_GROUPS) {
    float first = as_float(load_shared(exchange(2 * warp) + 4 * lane));
    store_shared(query_sums(warp) + 4 * lane, __float_as_uint(first + as_float(load_shared(exchange(2 * warp + 1) + 4 * lane))));
  }
  factor /= 1 << 2 * warp;
  for (int i = 0; i < WORDS; i++) {
    int word = (i + lane) % WORDS;
    u32 even[4], odd[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint2 four = load_shared2(row + 2 * channel_of_word(word, c));
      even[c] = live ? pack_half(low_half<Q_BF16>(four.x) * factor, low_half<Q_BF16>(four.y) * factor) : 0;
      odd[c] = live ? pack_half(high_half<Q_BF16>(four.x) * factor, high_half<Q_BF16>(four.y) * factor) : 0;
    }
    u32 at = columns + (warp * WORDS + word) * DEPTH_BYTES + lane * 16;
    store_shared4(at, make_uint4(even[0], even[1], even[2], even[3]));
    store_shared4(at + DEPTH_BYTES / 2, make_uint4(odd[0], odd[1], odd[2], odd[3]));
  }
  show_to_products();
  meet();
}

// Codes of this lane's two tokens. Of three bits ``high`` has those of two words, the second one's a bit further up.
struct TeamWords {
  static constexpr bool HAS_HIGH = KeyRows::BITS == 3;
  u32 low[WORDS][2], high[HAS_HIGH ? WORDS / 2 : 1][2];

  // ``codes``: of the stage's first token.
  DEVICE void load(u32 codes, const Team& team) {
    if constexpr (HAS_HIGH) {
#pragma unroll
      for (int row = 0; row < 2; row++)
#pragma unroll
        for (int span = 0; span < 2; span++) {
          u32 at = codes + (16 * team.warp + 8 * row + team.lane / 4) * KeyRows::ROW_BYTES;
          uint2 two = load_shared2(at + 32 * span + team.lane % 4 * 8);
          low[2 * span][row] = two.x, low[2 * span + 1][row] = two.y;
          high[span][row] = load_shared(at + KeyRows::WIDTH + 16 * span + team.lane % 4 * 4);
        }
    } else {
#pragma unroll
      for (int word = 0; word < WORDS; word += 2) {
        u32 x[4];
        load_matrices(x, codes + (16 * team.warp + team.lane % 16) * KeyRows::ROW_BYTES + 16 * (word + team.lane / 16));
        low[word][0] = x[0], low[word][1] = x[1], low[word + 1][0] = x[2], low[word + 1][1] = x[3];
      }
    }
  }

  // Even or odd channels of a word's plane. Halves have room for the third bit of the last plane above the byte.
  DEVICE u32 operand(int word, int plane, int row, int odd) const {
    u32 x = odd ? low[word][row] >> 8 : low[word][row], mask = 0x00030003u << (2 * plane);
    if (!HAS_HIGH) return x & mask;
    u32 upper = word % 2 ? high[word / 2][row] >> 1 : high[word / 2][row];
    if (plane == 3) return (x & mask) | ((odd ? upper : upper << 8) & 0x01000100u);
    return (x & mask) | ((odd ? upper >> 8 : upper) & 0x00040004u << (2 * plane));
  }
};

// Until all products that are running are done; then their sums may be touched.
template <int COUNT>
DEVICE void wait_for_sums(float (&sums)[COUNT][SUMS]) {
  products_wait<0>();
#pragma unroll
  for (auto& product : sums)
#pragma unroll
    for (float& x : product) settled(x);
}

struct TeamKeys {
  float sums[K_GROUPS][SUMS];

  // Its products are still running at the end.
  DEVICE void multiply(u32 codes, const Team& team) {
    TeamWords words;
    words.load(codes, team);
    u32 columns = matrix_at(team.columns, DEPTH_BYTES / 2);
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
      if (word >= 2) products_wait<1>();  // registers for more operands are missing
      u32 a[4][4];
#pragma unroll
      for (int plane = 0; plane < 4; plane++)
#pragma unroll
        for (int i = 0; i < 4; i++) settled(a[plane][i] = words.operand(word, plane, i % 2, i / 2));
      products_begin();
#pragma unroll
      for (int plane = 0; plane < 4; plane++) {
        u32 at = columns + (plane * WORDS + word) * (DEPTH_BYTES >> 4);
        if (word == 0 && plane % 2 == 0) product<false, false>(sums[plane / 2], a[plane], at);
        else product<false, true>(sums[plane / 2], a[plane], at);
      }
      products_commit();
    }
  }
  DEVICE void wait() { wait_for_sums(sums); }
  DEVICE float of(int group, int row, int k) const { return sums[group][k / 2 * 4 + 2 * row + k % 2]; }
};
