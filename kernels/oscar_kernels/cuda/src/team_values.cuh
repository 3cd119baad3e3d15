// Products of four warps with quantized values: 64 channels of each plane by 32 columns, over the 64 tokens of a stage.
//
// As in values_float.cuh codes are subnormal float16 numbers, and weights times value scales times a factor lie below 2.
// They are the products' columns, in shared memory: two matrices for the two groups of channels, of this stage and the next.
#pragma once

#include "team_keys.cuh"
#include "tile.cuh"

using TokenParams = Param[2][2];  // of this lane's two tokens, of both groups

DEVICE void load_params(TokenParams& params, u32 first, int row_bytes) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    uint2 two = load_shared2(first + 8 * row * row_bytes);
    params[row][0] = {low_half<SCALE_BF16>(two.x), high_half<SCALE_BF16>(two.x)};
    params[row][1] = {low_half<SCALE_BF16>(two.y), high_half<SCALE_BF16>(two.y)};
  }
}

// Log2 weights of this lane's tokens relative to the maximum.
struct TeamLogits {
  float x[2][OWN];
};

// The running state of a kv head. All its warps have the same maxima; totals are of a lane's own tokens. A warp has the sums
// of 16 channels of every plane: row r of a product is channel 2 r of them, row r + 8 channel 2 r + 1.
struct TeamState {
  float sums[4][SUMS];
  float top[OWN], total[OWN], shift[OWN][V_GROUPS];
  float factor;

  DEVICE void clear() {
#pragma unroll
    for (auto& plane : sums)
#pragma unroll
      for (float& x : plane) x = 0;
#pragma unroll
    for (int k = 0; k < OWN; k++) top[k] = LOWEST, total[k] = shift[k][0] = shift[k][1] = 0;
    factor = 1e30f;
  }
  // Before the first stage of history logits are relative to 0.
  DEVICE void begin() {
#pragma unroll
    for (float& x : top) x = 0;
  }
  DEVICE bool none_yet() const { return factor == 1e30f; }

  DEVICE void wait() { wait_for_sums(sums); }

  // What was summed up in weights of columns counts ``fade`` times as much, and sums are of ``change`` times as large a unit.
  DEVICE void scale(const float (&fade)[OWN], float change) {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      total[k] *= fade[k];
      for (float& x : shift[k]) x *= fade[k];
    }
#pragma unroll
    for (auto& plane : sums)
#pragma unroll
      for (int i = 0; i < SUMS; i++) plane[i] *= fade[owner(i)] * change;
  }

  DEVICE void raise(TeamLogits& logits, const TokenParams& params, const Team& team);

  // See FloatValues: tensor cores cut sums off, and a stage is four products.
  static constexpr int RUN_STAGES = 512;
  DEVICE void make_room(float* spill, bool first) {
    float ratio[OWN];
    spilled_units(spill, ratio);
#pragma unroll
    for (int plane = 0; plane < 4; plane++)
#pragma unroll
      for (int i = 0; i < SUMS; i++) {
        float* at = spill + (plane * SUMS + i) * 32;
        *at = first ? sums[plane][i] : sums[plane][i] + *at * ratio[owner(i)];
        sums[plane][i] = 0;
      }
#pragma unroll
    for (int k = 0; k < OWN; k++) spill[(4 * SUMS + k) * 32] = top[k];
    spill[(4 * SUMS + OWN) * 32] = factor;
  }
  DEVICE void spilled_units(const float* spill, float (&ratio)[OWN]) const {
    float change = factor / spill[(4 * SUMS + OWN) * 32];
#pragma unroll
    for (int k = 0; k < OWN; k++) ratio[k] = exp2_fast(spill[(4 * SUMS + k) * 32] - top[k]) * change;
  }

  // The end of history: sums of weights times scales times codes.
  DEVICE void finish(const float* spill, bool spilled) {
    if (spilled) {
      float ratio[OWN];
      spilled_units(spill, ratio);
#pragma unroll
      for (int plane = 0; plane < 4; plane++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[plane][i] += spill[(plane * SUMS + i) * 32] * ratio[owner(i)];
    }
    float unit = SUBNORMAL / factor;
#pragma unroll
    for (int plane = 0; plane < 4; plane++)
#pragma unroll
      for (float& x : sums[plane]) x *= unit / (1 << 2 * plane);
  }
};

// New maxima and a new factor for weights that do not fit, which are then at most 0.5. By all warps.
DEVICE void TeamState::raise(TeamLogits& logits, const TokenParams& params, const Team& team) {
  bool first = none_yet();
  float peak[OWN], fade[OWN], kept = 0, largest = 1e-30f;
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    peak[k] = fmaxf(logits.x[0][k], logits.x[1][k]) + top[k];
    for (int step = 4; step < 32; step *= 2) peak[k] = fmaxf(peak[k], __shfl_xor_sync(FULL_WARP, peak[k], step));
    if (team.lane < 4) store_shared(team.exchange(team.warp) + 4 * column_of(k), __float_as_uint(peak[k]));
  }
  team.meet();
#pragma unroll
  for (int k = 0; k < OWN; k++) {
    peak[k] = first ? LOWEST : top[k];
    for (int w = 0; w < 4; w++) peak[k] = fmaxf(peak[k], as_float(load_shared(team.exchange(w) + 4 * column_of(k))));
    fade[k] = first ? 1.0f : exp2_fast(top[k] - peak[k]);
    kept = fmaxf(kept, fade[k]);
#pragma unroll
    for (int row = 0; row < 2; row++) {
      logits.x[row][k] += top[k] - peak[k];
      float weight = exp2_fast(logits.x[row][k]);
      // Scales times the factor are float16 numbers, too, whatever the weight is.
      for (const Param& param : params[row]) largest = fmaxf(largest, fmaxf(weight, 1 / 65536.0f) * param.scale);
    }
    top[k] = peak[k];
  }
  kept = team.largest_of_all(kept);
  largest = team.largest_of_all(largest);
  float old = factor;
  factor = fminf(0.5f / largest, old / kept);
  scale(fade, factor / old);
}

struct TeamWeights {
  float of[2][OWN];

  // Times value scales and the factor, into shared memory. True where a number is 2 or more, infinite or NaN.
  DEVICE bool write(const TeamLogits& logits, const TokenParams& params, float factor, const Team& team, u32 to) {
    u32 bits = 0;
#pragma unroll
    for (int row = 0; row < 2; row++) {
      u32 both[OWN / 2];
#pragma unroll
      for (int k = 0; k < OWN; k++) of[row][k] = exp2_fast(logits.x[row][k]);
#pragma unroll
      for (int j = 0; j < OWN / 2; j++) both[j] = pack_half(of[row][2 * j], of[row][2 * j + 1]);
#pragma unroll
      for (int g = 0; g < V_GROUPS; g++) {
        float scale = params[row][g].scale * factor;
        u32 pair[OWN / 2], scales = pack_half(scale, scale);
#pragma unroll
        for (int j = 0; j < OWN / 2; j++) pair[j] = multiply_halves(both[j], scales), bits |= pair[j];
        store_matrices(to + g * (WEIGHT_BYTES / V_GROUPS) + (2 * team.warp + row) * (DEPTH_BYTES / 2) + team.lane * 16, pair);
      }
    }
    show_to_products();
    return bits & 0x40004000u;  // the second bit of a float16 tells
  }

  // They count in the softmax from now on.
  DEVICE void count(TeamState& state, const TokenParams& params) const {
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        state.total[k] += of[row][k];
#pragma unroll
        for (int g = 0; g < V_GROUPS; g++)
          state.shift[k][g] = fmaf(of[row][k], params[row][g].scale * params[row][g].zero, state.shift[k][g]);
      }
  }
};

// Codes of eight tokens each: two bytes of each of two tokens.
struct TeamValues {
  u32 words[STAGE_TOKENS / 8];

  // ``codes``: of the stage's first token.
  DEVICE void load(u32 codes, const Team& team) {
#pragma unroll
    for (int m = 0; m < STAGE_TOKENS / 8; m += 4) {
      u32 x[4];
      load_transposed(x, codes + (8 * m + team.lane) * ValueRows::ROW_BYTES + 16 * team.warp);
      for (int i = 0; i < 4; i++) words[m + i] = x[i];
    }
  }

  // Its products are still running at the end.
  DEVICE void multiply(TeamState& state, u32 weights) const {
    u32 columns = matrix_at(weights, DEPTH_BYTES / 2);
#pragma unroll
    for (int step = 0; step < STAGE_TOKENS / DEPTH; step++) {
      if (step >= 2) products_wait<1>();
      u32 a[4][4];
#pragma unroll
      for (int plane = 0; plane < 4; plane++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 x = words[2 * step + i / 2];
          settled(a[plane][i] = (i % 2 ? x >> 8 : x) & 0x00030003u << (2 * plane));
        }
      products_begin();
#pragma unroll
      for (int plane = 0; plane < 4; plane++)
        product<true, true>(state.sums[plane], a[plane],
                            columns + plane / 2 * (WEIGHT_BYTES / V_GROUPS >> 4) + step * (DEPTH_BYTES >> 4));
      products_commit();
    }
  }
};
