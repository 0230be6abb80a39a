// The panel way, for many rows (prefill, large groups): tiles of K and V are packed once and meet all rows.
#pragma once

#include "ends.hpp"

namespace pagegen {
namespace {

template <class C> struct Panel : Ends<C> {
  using Base = Ends<C>;
  using typename Base::Args, typename Base::FactorPlaces, typename Base::Factors, typename Base::KV, typename Base::M;
  using typename Base::Span, typename Base::State, typename Base::Tile, typename Base::VWord, typename Base::Weight;
  using typename Base::Word;
  using Base::AHEAD, Base::D, Base::DV, Base::FACTORS, Base::G, Base::MR, Base::OUT, Base::PANEL_ROWS, Base::RUN;
  using Base::TILE, Base::VECTORS, Base::KEY_FULL, Base::KEY_LANES, Base::KEY_TAIL, Base::KEY_WORDS, Base::VALUE_FULL;
  using Base::VALUE_LANES, Base::VALUE_TAIL;

  struct Scratch {
    alignas(64) Word q[PANEL_ROWS][KEY_WORDS];
    alignas(64) float sums[PANEL_ROWS][OUT];
    alignas(64) Word k[KEY_WORDS][TILE];           // transposed: words of the head dimension by tokens
    alignas(64) Word v[TILE / M::step][OUT];
    alignas(64) float score[MR][TILE];
    alignas(64) Weight weight[MR][TILE];
    Factors factors;
    FactorPlaces places;
    State state[PANEL_ROWS];
    float q_sum[PANEL_ROWS];
  };

  // Packs the live rows of K and V, and zeroes for the others: NaN in an unused slot must not be read.
  static void pack(const Args& a, const Tile& tile, const KV* k_cache, const KV* v_cache, Scratch& w) {
    const auto row = [&](const KV* cache, const int64_t* runs, int64_t stride, int t) __attribute__((always_inline)) {
      return tile.live(t) ? cache + runs[t / RUN] + t % RUN * stride : Base::kZeroRow;
    };
    for (int t = 0; t < TILE; t += W) {
      const KV* rows[W];
      for (int j = 0; j < W; j++) rows[j] = row(k_cache, tile.k, a.k_slot_stride, t + j);
      const auto turn = [&](auto loader, int vector) __attribute__((always_inline)) {
        VWord loaded[W];
        vi words[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
          loaded[j] = loader(Base::at(rows[j], vector * KEY_LANES));
          words[j] = M::bits(loaded[j]);
        }
        transpose(words, (int32_t*)&w.k[vector * W][t], TILE);
        if constexpr (C::shared_kv) { // the same load is the values' too
          static_assert(KEY_LANES == VALUE_LANES);
          if (vector * VALUE_LANES >= DV) return;
          for (int j = 0; j < W; j += M::step) {
            VWord pairs[M::value_vectors];
            M::interleave(loaded + j, pairs);
            store_values(pairs, w.v[(t + j) / M::step] + vector * VALUE_LANES);
          }
        }
      };
#pragma GCC unroll 1 // packing is a small part, and long
      for (int i = 0; i < KEY_FULL; i++) turn([](const KV* p) { return M::template load_row<KEY_LANES>(p); }, i);
      if constexpr (KEY_TAIL > 0) turn([](const KV* p) { return M::template load_row<KEY_TAIL>(p); }, KEY_FULL);
    }
    for (int t = 0; t < TILE && !C::shared_kv; t += M::step) {
      const KV* rows[M::step];
      for (int j = 0; j < M::step; j++) rows[j] = row(v_cache, tile.v, a.v_slot_stride, t + j);
      VWord words[M::value_vectors];
#pragma GCC unroll 1
      for (int i = 0; i < VALUE_FULL; i++) {
        Base::template load_values<VALUE_LANES>(rows, i * VALUE_LANES, words);
        store_values(words, w.v[t / M::step] + i * VALUE_LANES);
      }
      if constexpr (VALUE_TAIL > 0) {
        Base::template load_values<VALUE_TAIL>(rows, VALUE_FULL * VALUE_LANES, words);
        store_values(words, w.v[t / M::step] + VALUE_FULL * VALUE_LANES);
      }
    }
  }

  static PAGEGEN_INLINE void store_values(const VWord* words, Word* to) {
    for (int i = 0; i < M::value_vectors; i++) M::store_words(to + i * W, words[i]);
  }

  // c[MR][COUNT * W] = c * rescale (or 0) + a[MR][steps] b[steps][...], the product in registers
  template <int COUNT, int A_STRIDE, int B_STRIDE, int C_STRIDE, bool FRESH>
  static PAGEGEN_INLINE void multiply(int steps, const Word* a, const Word* b, float* c, const float* rescale) {
    vf sum[MR][COUNT];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int j = 0; j < COUNT; j++) sum[r][j] = vf{};
#pragma GCC unroll 2
    for (int k = 0; k < steps; k++) {
      VWord right[COUNT];
#pragma GCC unroll 4
      for (int j = 0; j < COUNT; j++) right[j] = M::load_words(b + k * B_STRIDE + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const VWord left = M::broadcast(a[r * A_STRIDE + k]);
#pragma GCC unroll 4
        for (int j = 0; j < COUNT; j++) sum[r][j] = M::dot(sum[r][j], right[j], left);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int j = 0; j < COUNT; j++) {
        float* to = c + r * C_STRIDE + j * W;
        store(to, FRESH ? sum[r][j] : fma(load(to), splat(rescale[r]), sum[r][j]));
      }
  }

  static constexpr int PART = std::min(kPanelVectors, TILE / W); // vectors of scores that are made at once

  // A float32 score is summed in parts: a chain of 128 additions is off by 2.6 times what torch's SDPA is.
  static void scores(const Word* q, Span span, Scratch& w) {
    constexpr int WORDS = ceil_div(D, M::step), CHAIN = std::min(WORDS, M::step == 1 ? 32 : 288), REST = WORDS % CHAIN;
    float kept[MR];
    std::fill(kept, kept + MR, 1.0f);
    for (int t = span.begin; t < span.end; t += PART * W) {
      float* score = &w.score[0][t];
      multiply<PART, KEY_WORDS, TILE, TILE, true>(CHAIN, q, &w.k[0][t], score, kept);
      for (int i = CHAIN; i + CHAIN <= WORDS; i += CHAIN)
        multiply<PART, KEY_WORDS, TILE, TILE, false>(CHAIN, q + i, &w.k[i][t], score, kept);
      if constexpr (REST > 0)
        multiply<PART, KEY_WORDS, TILE, TILE, false>(REST, q + WORDS - REST, &w.k[WORDS - REST][t], score, kept);
    }
  }

  static void values(float* sums, const float* rescale, Span span, Scratch& w) {
    constexpr int COLUMNS = even_part(VECTORS, kPanelVectors), REST = VECTORS % COLUMNS, STRIDE = TILE / M::step;
    const int first = span.begin / M::step, steps = (span.end - span.begin) / M::step;
    const Word* weight = (const Word*)&w.weight[0][0] + first;
    for (int c = 0; c + COLUMNS <= VECTORS; c += COLUMNS)
      multiply<COLUMNS, STRIDE, OUT, OUT, false>(steps, weight, &w.v[first][c * W], sums + c * W, rescale);
    if constexpr (REST > 0) {
      constexpr int c = VECTORS - REST;
      multiply<REST, STRIDE, OUT, OUT, false>(steps, weight, &w.v[first][c * W], sums + c * W, rescale);
    }
  }

  static void one_tile(const Args& a, const Item& item, int32_t t0, float scale, Scratch& w) {
    const int rows = item.queries * G;
    for (int r0 = 0; r0 < rows; r0 += MR) {
      const int count = std::min(MR, rows - r0);
      Span span{TILE, 0}; // what these rows attend: on the diagonal, half of the tile
      for (int r = r0; r < r0 + count; r++) {
        const Keys keys = Base::keys_in(a, item, r / G, item.head * G + r % G, t0);
        if (std::max(keys.begin, 0) >= std::min(keys.end, TILE)) continue;
        span = {std::min(span.begin, std::max(keys.begin, 0)), std::max(span.end, std::min(keys.end, TILE))};
      }
      if (span.begin >= span.end) continue;
      span = {span.begin / (PART * W) * (PART * W), round_up(span.end, PART * W)};
      scores(w.q[r0], span, w);
      float rescale[MR];
      for (int r = 0; r < count; r++)
        rescale[r] = Base::weigh(a, item, (r0 + r) / G, item.head * G + (r0 + r) % G, t0, Base::kPlain, span, scale,
                               w.q_sum[r0 + r], w.factors, w.score[r], w.weight[r], w.state[r0 + r]);
      for (int r = count; r < MR; r++) {
        rescale[r] = 1.0f;
        std::memset((void*)w.weight[r], 0, sizeof w.weight[r]);
      }
      values(w.sums[r0], rescale, span, w);
    }
  }

  static void run(const Args& a, const Item& item, float* partials, Scratch& w) {
    const int32_t begin = item.key_begin, end = item.key_end;
    const int rows = item.queries * G, padded = round_up(rows, MR);
    for (int r = 0; r < rows; r++)
      w.q_sum[r] = Base::load_query(a, item.token + r / G, item.head * G + r % G, w.q[r]);
    std::memset((void*)w.q[rows], 0, sizeof(w.q[0]) * (padded - rows));
    std::memset(w.sums, 0, sizeof(w.sums[0]) * padded);
    std::fill(w.state, w.state + rows, State{});
    const KV* k_cache = (const KV*)a.k_cache + item.head * a.k_head_stride;
    const KV* v_cache = (const KV*)a.v_cache + item.head * a.v_head_stride;
    const float scale = begin < end ? a.scale * Base::head_scale(a.k_scale, item.head) : 0.0f;
    Tile tile, next;
    if (begin < end) Base::locate(a, item, begin / TILE * TILE, next);
    for (int32_t t0 = begin / TILE * TILE; t0 < end; t0 += TILE) {
      tile = next;
      if (t0 + TILE < end) Base::locate(a, item, t0 + TILE, next);
      if (tile.live.any()) {
        pack(a, tile, k_cache, v_cache, w);
        if constexpr (FACTORS) {
          Base::find_factors(a, tile, Base::kPlain, w.places);
          Base::load_factors(a, tile, w.places, item.head, Base::kPlain, {0, TILE}, w.factors);
        }
      }
      if (AHEAD && t0 + TILE < end && next.live.any()) prefetch_tile(a, next, item.head, k_cache, v_cache, w);
      if (tile.live.any()) one_tile(a, item, t0, scale, w);
    }
    for (int r = 0; r < rows; r++) Base::store_row(a, item, 0, r, w.sums[r], w.state[r], partials);
  }

  static void prefetch_tile(const Args& a, const Tile& tile, int head, const KV* k_cache, const KV* v_cache,
                            Scratch& w) {
    for (int t = 0; t < TILE; t++) {
      Base::template prefetch<D>(k_cache + tile.k[t / RUN] + t % RUN * a.k_slot_stride);
      if constexpr (!C::shared_kv)
        Base::template prefetch<DV>(v_cache + tile.v[t / RUN] + t % RUN * a.v_slot_stride);
    }
    if constexpr (FACTORS) {
      Base::find_factors(a, tile, Base::kPlain, w.places);
      Base::prefetch_factors(a, w.places, head, 1, {0, TILE});
    }
  }
};

} // namespace
} // namespace pagegen
