// The products of the stream way over words: float32, or pairs of bf16 (products.hpp).
#pragma once

#include "rows.hpp"

namespace pagegen {
namespace {

template <class C> struct Words : TileRows<C> {
  using Base = TileRows<C>;
  using typename Base::Args, typename Base::Factors, typename Base::KV, typename Base::M, typename Base::PrefetchK;
  using typename Base::PrefetchV, typename Base::Rows, typename Base::Span, typename Base::State, typename Base::VWord;
  using typename Base::Word;
  using Base::D, Base::DV, Base::OUT, Base::R, Base::SUMS, Base::TILE, Base::TOKENS, Base::VECTORS, Base::KEY_FULL;
  using Base::KEY_LANES, Base::KEY_TAIL, Base::VALUE_LANES, Base::VALUE_TAIL;
  using Weight = typename Base::Weight;

  struct Query { // R rows of one query
    alignas(64) Word word[R][Base::KEY_WORDS];
    float sum[R]; // of a row's elements, which zero points are multiplied by
  };

  static void load_query(const Args& a, int64_t token, int head, Query& q) {
    for (int r = 0; r < R; r++) q.sum[r] = Base::load_query(a, token, head + r, q.word[r]);
  }

  struct Turn { // keys of one head, and what meets them
    Rows k;
    PrefetchK next;
    const Query& q;
    float (*score)[TILE];
  };
  static void scores(const Rows& k, PrefetchK next, const Query& q, Span span, float (*score)[TILE]) {
    scores(1, span, [&](int) __attribute__((always_inline)) { return Turn{k, next, q, score}; });
  }
  // Several in turn. Adding up across lanes is a long chain: it is done for the tokens before, another head's perhaps,
  // beside the products of the next ones. (By tokens, where a turn is two steps long: 1.05 to 1.18 times as fast as
  // adding up at the end of each.)
  template <class At> static void scores(int turns, Span span, At at) {
    constexpr int AT_ONCE = M::key_vectors, MANY = KEY_FULL / AT_ONCE * AT_ONCE;
    constexpr int STEPS = MANY / AT_ONCE + (MANY < KEY_FULL) + (KEY_TAIL > 0);
    // Places of a step at which lines are prefetched. More than 8 short vectors (Arm's) are a loop that stays one.
    constexpr int PLACES = STEPS <= 8 ? STEPS : 1;
    vf held[SUMS]; // of the tokens before, from `held_from` on
    int held_from = span.begin;
    float(*held_score)[TILE] = nullptr;
#pragma GCC unroll 16
    for (int i = 0; i < SUMS; i++) held[i] = vf{};
    for (int n = 0; n < turns; n++) {
      const Turn turn = at(n);
      if (n == 0) held_score = turn.score; // zeros, which the first step's sums replace
      for (int t = span.begin; t < span.end; t += TOKENS) {
        const KV* row[TOKENS];
        vf sum[SUMS] = {};
#pragma GCC unroll 16
        for (int j = 0; j < TOKENS; j++) row[j] = turn.k.row(t + j);
        const auto add = [&]<int VECTORS>(auto loader, int vector, int place) __attribute__((always_inline)) {
          if (PLACES > 1 || place == 0) turn.next.template issue<TOKENS, 1, PLACES>(t, 0, place);
          VWord key[TOKENS][VECTORS];
#pragma GCC unroll 16
          for (int j = 0; j < TOKENS; j++) loader(Base::at(row[j], vector * KEY_LANES), key[j]);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
            for (int i = 0; i < VECTORS; i++) {
              const VWord query = M::load_words(turn.q.word[r] + (vector + i) * W);
#pragma GCC unroll 16
              for (int j = 0; j < TOKENS; j++) sum[r * TOKENS + j] = M::dot(sum[r * TOKENS + j], key[j][i], query);
            }
          }
        };
        const auto load = [](const KV* p, VWord* out) __attribute__((always_inline)) { M::load_keys(p, out); };
        if constexpr (MANY > 0) add.template operator()<AT_ONCE>(load, 0, 0);
        store_sums(held, held_from, held_score);
#pragma GCC unroll 4
        for (int i = AT_ONCE; i < MANY; i += AT_ONCE) add.template operator()<AT_ONCE>(load, i, i / AT_ONCE);
        if constexpr (MANY < KEY_FULL)
          add.template operator()<1>([](const KV* p, VWord* out) { *out = M::template load_row<KEY_LANES>(p); }, MANY,
                                     MANY / AT_ONCE);
        if constexpr (KEY_TAIL > 0)
          add.template operator()<1>([](const KV* p, VWord* out) { *out = M::template load_row<KEY_TAIL>(p); },
                                     KEY_FULL, STEPS - 1);
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) held[i] = sum[i];
        held_score = turn.score;
        held_from = t;
      }
    }
    store_sums(held, held_from, held_score);
  }

  static PAGEGEN_INLINE void store_sums(const vf* sum, int t, float (*score)[TILE]) {
    alignas(64) float all[SUMS];
#pragma GCC unroll 8
    for (int i = 0; i < SUMS; i += W) store(all + i, sum_each(sum + i));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) std::memcpy(&score[r][t], all + r * TOKENS, TOKENS * sizeof(float));
  }

  struct Weights {
    alignas(64) Weight weight[R][TILE];
  };
  static PAGEGEN_INLINE Weight* weights_of(Weights& w, int r) { return w.weight[r]; }
  // Weights are what softmax left; there is no residual. See Bytes.
  static PAGEGEN_INLINE bool prepare(Weights&, int, Span, const Factors&, State&) { return false; }
  static PAGEGEN_INLINE void prepare_residual(Weights&, int, Span, const Factors&, State&) {}

  // A row of V meets several rows of q at once: with few, it is taken whole in one pass of many columns; with many, it
  // is loaded once, column part by column part, which pays where it is converted or strewn over the sets of the L1.
  static constexpr int ROWS_AT_ONCE = std::min(R, sizeof(KV) == 1 ? 8 : C::rows_together);
  static constexpr int COLUMNS_AT_MOST = kAccumulators / ROWS_AT_ONCE / M::value_vectors * M::value_vectors;
  static constexpr int COLUMN_PART =
      round_up(even_part(VECTORS, std::max(M::value_vectors, COLUMNS_AT_MOST)), M::value_vectors);
  static constexpr int COLUMN_REST = VECTORS % COLUMN_PART;
  static constexpr int ROW_PART = even_part(R, std::max(1, kAccumulators / COLUMN_PART));
  static constexpr int ROW_REST = R % ROW_PART;
  static constexpr int BLOCKS = ceil_div(VECTORS, COLUMN_PART) * ceil_div(R, ROW_PART);

  // Sums of rows r0 .. r0 + ROWS over COLUMNS accumulator vectors from column c0 on, kept in registers.
  template <int ROWS, int COLUMNS>
  static PAGEGEN_INLINE void block(const Rows& v, const PrefetchV& next, Span span, int pass, int r0, int c0,
                                   const Weights& weights, const float* rescale, float (*sums)[OUT]) {
    vf sum[ROWS][COLUMNS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = vf{};
    for (int t = span.begin; t < span.end; t += M::step) {
      const KV* row[M::step];
#pragma GCC unroll 2
      for (int j = 0; j < M::step; j++) row[j] = v.row(t + j);
      VWord p[ROWS];
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) {
        Word word;
        std::memcpy(&word, &weights.weight[r0 + r][t], sizeof(Word));
        p[r] = M::broadcast(word);
      }
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c += M::value_vectors) {
        next.template issue<M::step, BLOCKS, COLUMNS / M::value_vectors, COLUMN_PART / M::value_vectors>(
            t, pass, c / M::value_vectors);
        VWord value[M::value_vectors];
        const int column = c0 + c * W;
        if (VALUE_TAIL == 0 || column + VALUE_LANES <= DV) Base::template load_values<VALUE_LANES>(row, column, value);
        else if constexpr (VALUE_TAIL > 0) Base::template load_values<VALUE_TAIL>(row, column, value);
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int i = 0; i < M::value_vectors; i++) sum[r][c + i] = M::dot(sum[r][c + i], value[i], p[r]);
      }
    }
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c++) {
        float* to = &sums[r0 + r][c0 + c * W];
        // older sums last: fewer roundings of large numbers
        store(to, fma(load(to), splat(rescale[r0 + r]), sum[r][c]));
      }
  }

  template <int COLUMNS>
  static void column(const Rows& v, const PrefetchV& next, Span span, int pass, int c0, const Weights& weights,
                     const float* rescale, float (*sums)[OUT]) {
    for (int r = 0; r + ROW_PART <= R; r += ROW_PART)
      block<ROW_PART, COLUMNS>(v, next, span, pass++, r, c0, weights, rescale, sums);
    if constexpr (ROW_REST > 0) block<ROW_REST, COLUMNS>(v, next, span, pass, R - ROW_REST, c0, weights, rescale, sums);
  }

  // sums = sums * rescale + the tile's
  static void values(const Rows& v, PrefetchV next, Span span, const Weights& weights, const float* rescale,
                     float (*sums)[OUT]) {
    constexpr int ROW_PARTS = ceil_div(R, ROW_PART), MANY = VECTORS / COLUMN_PART;
    for (int i = 0; i < MANY; i++)
      column<COLUMN_PART>(v, next, span, i * ROW_PARTS, i * COLUMN_PART * W, weights, rescale, sums);
    if constexpr (COLUMN_REST > 0)
      column<COLUMN_REST>(v, next, span, MANY * ROW_PARTS, MANY * COLUMN_PART * W, weights, rescale, sums);
  }

  static constexpr int WIDTH = OUT; // of a row of sums
  static PAGEGEN_INLINE const float* ordered(const float* sums, float*) { return sums; }
};

} // namespace
} // namespace pagegen
