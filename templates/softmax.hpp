// Softmax over one row of a tile: what a score goes through, who may be attended, and the running state.
#pragma once

#include "functions.hpp"
#include "tiles.hpp"

namespace pagegen {
namespace {

template <class C> struct Softmax : Tiles<C> {
  using Base = Tiles<C>;
  using typename Base::Args;
  using typename Base::Factors;
  using typename Base::Lanes, typename Base::Span;
  using Base::TILE, Base::TOKEN_SCALES, Base::ZEROS;

  static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
  static constexpr float INF = __builtin_inff();

  struct State { // of one row; scores in units of log2
    float max = -INF, total = 0.0f;
    float shift = 0.0f; // what zero points add to every column of the sums
  };

  struct Row { // of a tile
    Span span;
    int32_t begin, end;  // tokens of the tile that the row attends
    int32_t t0;          // position of the tile's first token
    int32_t position;    // of the query
    int32_t batch, head;
    float slope;         // ALiBi, times log2(e)
    const uint8_t* tree; // of the query, by token of the tile; null where the tile has none of this step's own
    int32_t own;         // the first of those
  };

  // the tokens of the tile that a row attends, not yet bounded by it
  static PAGEGEN_INLINE Keys keys_in(const Args& a, const Item& item, int query, int head, int32_t t0) {
    const Keys keys = Base::keys_of(a, item.sequence, head, item.position + query, a.seq_lens[item.sequence]);
    return {std::max(keys.begin, item.key_begin) - t0, std::min(keys.end, item.key_end) - t0};
  }

  static PAGEGEN_INLINE bool attends(const Args& a, const Item& item, int query, int head, int32_t t0) {
    const Keys keys = keys_in(a, item, query, head, t0);
    return std::max(keys.begin, 0) < std::min(keys.end, TILE);
  }

  // Which lanes the row attends, as -1 or 0, by the mask function and the tree.
  static void list_allowed(const Args& a, const Row& row, const Lanes& lanes, int32_t* allowed) {
    const Captured captured{a.captures};
    for (int i = row.span.begin; i < row.span.end; i++) {
      allowed[i] = -1;
      if constexpr (C::mask_mod)
        allowed[i] = -(int32_t)Modifiers::mask(captured, row.batch, row.head, row.position, row.t0 + lanes.token[i]);
    }
    if (!row.tree) return;
    for (int t = std::max({row.own, row.begin, 0}); t < std::min(row.end, TILE); t++)
      if (!row.tree[t]) allowed[lanes.lane[t]] = 0;
  }

  // Turns raw scores, by lane, into weights 2^(score - max) and returns what the row's older sums are to be
  // multiplied by.
  template <bool MASKED, class Weight>
  static PAGEGEN_INLINE float softmax(const Args& a, const Row& row, const Lanes& lanes, float scale, float q_sum,
                                      const Factors& f, float* score, Weight* weight, State& state) {
    // a score function sees natural units
    constexpr float UNIT = C::score_mod ? 1.0f : LOG2E;
    alignas(64) int32_t allowed[TILE];
    const bool listed = MASKED && (C::mask_mod || row.tree);
    if (listed) list_allowed(a, row, lanes, allowed);
    vf top = splat(-INF);
    const auto limit = [&](vf x, int i) __attribute__((always_inline)) {
      if constexpr (MASKED) {
        const vi token = load(lanes.token + i);
        vi open = (token >= row.begin) & (token < row.end);
        if (listed) open = open & load(allowed + i);
        x = select(open, x, splat(-INF));
      }
      store(score + i, x);
      top = larger(top, x);
    };
    for (int i = row.span.begin; i < row.span.end; i += W) {
      vf x = load(score + i);
      if constexpr (ZEROS) x = x - load(f.k_zero + i) * q_sum;
      if constexpr (TOKEN_SCALES) x = x * load(f.k_scale + i);
      if constexpr (C::logit_softcap != 0.0f) {
        x = tanh(x * (scale / C::logit_softcap)) * (C::logit_softcap * UNIT);
      } else {
        x = x * (scale * UNIT);
      }
      if constexpr (C::alibi) {
        const float slope = C::score_mod ? row.slope * LN2 : row.slope;
        x = x + __builtin_convertvector(load(lanes.token + i) + (row.t0 - row.position), vf) * slope;
      }
      if constexpr (C::score_mod) store(score + i, x);
      else limit(x, i);
    }
    if constexpr (C::score_mod) {
      const Captured captured{a.captures};
      for (int i = row.span.begin; i < row.span.end; i++)
        score[i] = Modifiers::score(captured, score[i], row.batch, row.head, row.position, row.t0 + lanes.token[i]);
      for (int i = row.span.begin; i < row.span.end; i += W) limit(load(score + i) * LOG2E, i);
    }
    const float max = std::max(state.max, max_lanes(top));
    const float rescale = max == state.max ? 1.0f : exp2(state.max - max);
    vf sum = vf{}, shift = vf{};
    for (int i = row.span.begin; i < row.span.end; i += W) {
      const vf x = load(score + i);
      vf w = select(x == -INF, vf{}, exp2(x - max)); // the maximum may be -inf itself
      sum = sum + w;
      if constexpr (TOKEN_SCALES) w = w * load(f.v_scale + i);
      store_float(weight + i, w);
      if constexpr (ZEROS) shift = fma(load_float(weight + i), load(f.v_zero + i), shift); // as rounded: it cancels
    }
    state.total = state.total * rescale + sum_lanes(sum);
    if constexpr (ZEROS) state.shift = state.shift * rescale + sum_lanes(shift);
    state.max = max;
    return rescale;
  }

  // One row's scores to weights; returns what its older sums are to be multiplied by. The row is made here, in
  // registers: copied to memory and back it cost 3% of a prefill.
  template <class Weight>
  static PAGEGEN_INLINE float weigh(const Args& a, const Item& item, int query, int head, int32_t t0,
                                    const Lanes& lanes, Span span, float scale, float q_sum, const Factors& f,
                                    float* score, Weight* weight, State& state) {
    const Keys keys = keys_in(a, item, query, head, t0);
    if (std::max(keys.begin, 0) >= std::min(keys.end, TILE)) {
      std::memset((void*)(weight + span.begin), 0, (span.end - span.begin) * sizeof(Weight));
      return 1.0f;
    }
    const int32_t own = item.own - t0;
    const uint8_t* tree = nullptr;
    if (Base::own_in(a, item, t0)) tree = a.tree_mask + (int64_t)(item.token + query) * a.tree_stride - own;
    const float slope = C::alibi ? a.alibi_slopes[head] * LOG2E : 0.0f;
    const Row row{span, keys.begin, keys.end, t0, item.position + query, item.sequence, head, slope, tree, own};
    if (keys.begin <= 0 && keys.end >= TILE && !tree && !C::mask_mod)
      return softmax<false>(a, row, lanes, scale, q_sum, f, score, weight, state);
    return softmax<true>(a, row, lanes, scale, q_sum, f, score, weight, state);
  }
};

} // namespace
} // namespace pagegen
