// Where rows begin and end: loading a query, keeping or finishing its sums, merging what splits left.
#pragma once

#include "softmax.hpp"

namespace pagegen {
namespace {

template <class C> struct Ends : Softmax<C> {
  using Base = Softmax<C>;
  using typename Base::Args, typename Base::KV, typename Base::M, typename Base::Q, typename Base::State;
  using Word = typename M::Word;
  using VWord = typename M::VWord;
  using Base::D, Base::DV, Base::G, Base::INF, Base::LN2, Base::LOG2E, Base::OUT, Base::STATE, Base::ZEROS;
  using Base::KEY_FULL, Base::KEY_LANES, Base::KEY_TAIL, Base::VALUE_LANES;

  static constexpr bool AHEAD = C::prefetch_ahead > 0;

  // the place of a column in a row of the cache
  static PAGEGEN_INLINE const KV* at(const KV* row, int column) { return row + column / kPack<KV>; }

  // N columns of `step` value rows, from `column` on
  template <int N> static PAGEGEN_INLINE void load_values(const KV* const* row, int column, VWord* out) {
    const KV* from[M::step];
#pragma GCC unroll 2
    for (int j = 0; j < M::step; j++) from[j] = at(row[j], column);
    M::template load_values<N>(from, out);
  }

  // Returns the sum of the query's elements, which zero points are multiplied by.
  static float load_query(const Args& a, int64_t token, int head, Word* to) {
    const Q* from = (const Q*)a.q + token * a.q_token_stride + head * a.q_head_stride;
    float sum = 0.0f;
    const auto put = [&](VWord words, int vector) __attribute__((always_inline)) {
      M::store_words(to + vector * W, words);
      if constexpr (ZEROS) sum += M::sum(words);
    };
    for (int i = 0; i < KEY_FULL; i++) put(M::template load_row<KEY_LANES>(from + i * KEY_LANES), i);
    if constexpr (KEY_TAIL > 0) put(M::template load_row<KEY_TAIL>(from + KEY_FULL * KEY_LANES), KEY_FULL);
    return sum;
  }

  // A row's sums are complete for the item: keep them for the merge, or finish the row.
  static void store_row(const Args& a, const Item& item, int head, int row, const float* sums, State state,
                    float* partials) {
    if (item.partial < 0) {
      finish(a, item.token + row / G, (item.head + head) * G + row % G, sums, state);
      return;
    }
    float* to = partials + item.partial + head * item.partial_head + (int64_t)row * STATE;
    std::memcpy(to, sums, sizeof(float) * OUT);
    to[OUT] = state.max;
    to[OUT + 1] = state.total;
    to[OUT + 2] = state.shift;
  }

  // Divides by the total, the head's sink included (here and nowhere else), and writes the row.
  static void finish(const Args& a, int64_t token, int head, const float* sums, State state) {
    float factor = state.total > 0.0f || state.total != state.total ? 1.0f / state.total : 0.0f;
    float lse = state.total > 0.0f || state.total != state.total ? state.max * LN2 + std::log(state.total) : -INF;
    if constexpr (C::sinks) {
      const float sink = a.sinks[head] * LOG2E;
      if (factor == 0.0f || (sink == INF && factor == factor)) { // it takes all the weight; NaN stays NaN
        factor = 0.0f;
        lse = a.sinks[head];
      } else {
        const float max = std::max(state.max, sink);
        const float old = exp2(state.max - max), total = state.total * old + exp2(sink - max);
        factor = old / total;
        lse = max * LN2 + std::log(total);
      }
    }
    if (a.lse) a.lse[token * a.lse_token_stride + head] = lse;
    const bool empty = factor == 0.0f;
    if (!empty) factor *= Base::head_scale(C::shared_kv ? a.k_scale : a.v_scale, head / G);
    alignas(64) Q row[OUT];
    for (int c = 0; c < OUT; c += VALUE_LANES) {
      vf x[M::value_vectors];
      for (int i = 0; i < M::value_vectors; i++) x[i] = load(sums + c + i * W);
      M::natural_order(x);
      for (int i = 0; i < M::value_vectors; i++)
        store_float(row + c + i * W, empty ? vf{} : (x[i] - state.shift) * factor);
    }
    Q* out = (Q*)a.out + token * a.out_token_stride + head * a.out_head_stride;
    std::memcpy(out, row, DV * sizeof(Q));
  }

  // Splits in ascending order of their keys, whatever thread computed them when.
  static void merge(const Args& a, const Merge& m, const float* partials) {
    const int rows = m.queries * G;
    for (int r = 0; r < rows; r++) {
      const float* first = partials + m.partial + (int64_t)r * STATE;
      const int64_t next = (int64_t)rows * STATE;
      State state;
      for (int s = 0; s < m.splits; s++) state.max = std::max(state.max, first[s * next + OUT]);
      alignas(64) float sums[OUT] = {};
      for (int s = 0; s < m.splits; s++) {
        const float* part = first + s * next;
        if (part[OUT + 1] == 0.0f) continue; // no key of this split was attended
        const float share = exp2(part[OUT] - state.max);
        state.total += share * part[OUT + 1];
        state.shift += share * part[OUT + 2];
        for (int c = 0; c < OUT; c += W) store(sums + c, fma(splat(share), load(part + c), load(sums + c)));
      }
      finish(a, m.token + r / G, m.head * G + r % G, sums, state);
    }
  }
};

} // namespace
} // namespace pagegen
