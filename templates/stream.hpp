// The stream way, for few rows (decode): rows of K and V are used straight from the cache. A tile is read head by head,
// or by tokens: a few tokens of every head in turn, first keys and then values, which is how memory lies where the
// heads of a token are side by side (NHD).
#pragma once

#include "bytes.hpp"
#include "words.hpp"

namespace pagegen {
namespace {

template <class C> using Products = std::conditional_t<TileRows<C>::BYTES, Bytes<C>, Words<C>>;

template <class C> struct Stream : Products<C> {
  using Base = Products<C>;
  using typename Base::Args, typename Base::Factors, typename Base::KV, typename Base::Lanes, typename Base::Places;
  using typename Base::PrefetchK, typename Base::PrefetchV, typename Base::Query, typename Base::Rows;
  using typename Base::Span, typename Base::State, typename Base::Tile, typename Base::Weights;
  using Base::AHEAD, Base::BY_TOKENS, Base::CHUNK, Base::FACTORS, Base::G, Base::OUT, Base::R, Base::STREAM_ROWS;
  using Base::TILE, Base::WIDTH;

  static constexpr int HEADS = C::heads_together;
  static constexpr int PARTS = G / R, SETS = std::max(1, STREAM_ROWS / R); // sets of R rows: of a query, of an item
  static constexpr int RING = BY_TOKENS ? 2 : C::prefetch_ahead + 1; // the present tile and those prefetched

  static constexpr int DISTANCE = C::prefetch_ahead * CHUNK; // of prefetching by tokens, in lanes
  static constexpr int KEPT = BY_TOKENS ? SETS : 1; // sets of a head whose weights are kept until values are read

  struct Head { // what an item keeps of one KV head: the rows of all its queries
    Query query[SETS];
    alignas(64) float sums[SETS][R][WIDTH];
    State state[SETS][R];
    alignas(64) float score[KEPT][R][TILE];
    Weights weights[KEPT];
    float rescale[KEPT][R];
    bool any[KEPT]; // whether a row of the set attends a token of the tile
  };

  struct Scratch {
    Head head[HEADS];
    Factors factors;
    Tile tiles[RING];
    Places places[RING];
    int64_t k_place[TILE], v_place[TILE]; // of a partial tile and one head
  };

  static PAGEGEN_INLINE bool any_attends(const Args& a, const Item& item, int h, int i, int32_t t0) {
    bool any = false; // heads differ only where a mask function says so
    for (int r = 0; r < (C::mask_range_by_head ? R : 1); r++)
      any |= Base::attends(a, item, i / PARTS, (item.head + h) * G + i % PARTS * R + r, t0);
    return any;
  }

  // A set's scores to weights, and what its older sums are to be multiplied by. Returns whether what rounding left of
  // the weights counts.
  static bool weigh_set(const Args& a, const Item& item, int h, int i, int32_t t0, const Lanes& lanes, Span span,
                        Scratch& w) {
    const int first = (item.head + h) * G + i % PARTS * R, kept = i % KEPT;
    const float scale = a.scale * Base::head_scale(a.k_scale, item.head + h);
    Head& own = w.head[h];
    bool coarse = false;
    for (int r = 0; r < R; r++) {
      State& state = own.state[i][r];
      own.rescale[kept][r] = Base::weigh(a, item, i / PARTS, first + r, t0, lanes, span, scale, own.query[i].sum[r],
                                       w.factors, own.score[kept][r], Base::weights_of(own.weights[kept], r), state);
      coarse |= Base::prepare(own.weights[kept], r, span, w.factors, state);
    }
    return coarse;
  }

  // One tile and one KV head: every query of the item meets it. The next one is prefetched by the first set of
  // rows that attends, or where a query is one set, by each query.
  static void one_tile(const Args& a, const Item& item, int h, int32_t t0, const Lanes& lanes, Span span, const Rows& k,
                       const Rows& v, const Rows& next_k, const Rows& next_v, Scratch& w) {
    Head& own = w.head[h];
    int end = TILE; // of the lanes that are prefetched
    for (int i = 0; i < item.queries * PARTS; i++) {
      if (!any_attends(a, item, h, i, t0)) continue;
      Base::scores(k, {next_k, 0, end}, own.query[i], span, own.score[0]);
      const bool coarse = weigh_set(a, item, h, i, t0, lanes, span, w);
      Base::values(v, {next_v, 0, end}, span, own.weights[0], own.rescale[0], own.sums[i]);
      end = 0;
      if (!coarse) continue;
      float rescale[R];
      std::fill(rescale, rescale + R, 1.0f);
      for (int r = 0; r < R; r++) Base::prepare_residual(own.weights[0], r, span, w.factors, own.state[i][r]);
      Base::values(v, {next_v, 0, 0}, span, own.weights[0], rescale, own.sums[i]);
    }
  }

  // Rows of every head of an item in one tile: keys or values.
  struct Side {
    const KV* cache; // of the item's first head
    int64_t head_stride;
    const int64_t* place;
    Span span; // of the tile
    int lines; // of a row
    PAGEGEN_INLINE Rows rows(int h) const { return {(uintptr_t)(cache + h * head_stride), place}; }
  };
  static PAGEGEN_INLINE Side keys_in(const Args& a, const Item& item, const Tile& tile, const Places& at) {
    return {(const KV*)a.k_cache + item.head * a.k_head_stride, a.k_head_stride, at.k, tile.span,
            Base::lines_of(Base::D)};
  }
  static PAGEGEN_INLINE Side values_in(const Args& a, const Item& item, const Tile& tile, const Places& at) {
    if constexpr (C::shared_kv) return keys_in(a, item, tile, at);
    return {(const KV*)a.v_cache + item.head * a.v_head_stride, a.v_head_stride, at.v, tile.span,
            Base::lines_of(Base::DV)};
  }

  struct Target { // of prefetching
    const Side& side;
    int lane, end;
    template <class To> PAGEGEN_INLINE To of_head(int h, int begin) const {
      return {side.rows(h), lane, end, begin, side.lines};
    }
  };
  // Visits one side of a tile, CHUNK lanes of all heads at a time, with what to prefetch meanwhile: the rows DISTANCE
  // lanes later, past the end those at the beginning of `then` (null: none).
  template <class Visit>
  static PAGEGEN_INLINE void each_chunk(const Side& side, const Side* then, Visit visit) {
    for (int t = side.span.begin; t < side.span.end; t += CHUNK) {
      const bool past = t + DISTANCE >= side.span.end;
      const Side& target = past && then ? *then : side;
      const int lane = past ? target.span.begin + t + DISTANCE - side.span.end : t + DISTANCE;
      visit(Span{t, t + CHUNK}, Target{target, lane, past && !then ? lane : std::min(lane + CHUNK, target.span.end)});
    }
  }

  // Scores of all heads. `plain`: each has one set of rows, and all attend the tile, so that they can be taken in turn.
  static PAGEGEN_INLINE void score_heads(const Item& item, const Tile& here, const Side& keys, const Side* then,
                                         bool plain, Scratch& w) {
    const bool whole = here.live.whole();
    each_chunk(keys, then, [&](Span span, Target target) __attribute__((always_inline)) {
      const auto rows = [&](int h) __attribute__((always_inline)) {
        return whole ? keys.rows(h) : Base::live_rows(keys.rows(h), here, span, w.k_place);
      };
      if (plain) {
        Base::scores(item.heads, span, [&](int h) __attribute__((always_inline)) {
          return typename Base::Turn{rows(h), target.template of_head<PrefetchK>(h, span.begin), w.head[h].query[0],
                                     w.head[h].score[0]};
        });
        return;
      }
      for (int h = 0; h < item.heads; h++) {
        const Rows k = rows(h);
        Head& own = w.head[h];
        PrefetchK next = target.template of_head<PrefetchK>(h, span.begin);
        for (int i = 0; i < item.queries * PARTS; i++) {
          if (!own.any[i]) continue;
          Base::scores(k, next, own.query[i], span, own.score[i]);
          next.end = 0; // once
        }
      }
    });
  }

  static PAGEGEN_INLINE void add_values(const Item& item, const Tile& here, const Side& values, const Side* then,
                                        Scratch& w) {
    each_chunk(values, then, [&](Span span, Target target) __attribute__((always_inline)) {
      for (int h = 0; h < item.heads; h++) {
        Rows v = values.rows(h);
        if (!here.live.whole()) v = Base::live_rows(v, here, span, w.v_place);
        Head& own = w.head[h];
        PrefetchV next = target.template of_head<PrefetchV>(h, span.begin);
        for (int i = 0; i < item.queries * PARTS; i++) {
          if (!own.any[i]) continue;
          Base::values(v, next, span, own.weights[i], own.rescale[i], own.sums[i]);
          std::fill(own.rescale[i], own.rescale[i] + R, 1.0f);
          next.end = 0;
        }
      }
    });
  }

  // One tile and all KV heads of the item.
  static void all_heads(const Args& a, const Item& item, int32_t t0, const Tile& here, const Places& place,
                        const Tile* later, const Places& later_place, Scratch& w) {
    const int sets = item.queries * PARTS;
    bool plain = sets == 1;
    for (int h = 0; h < item.heads; h++)
      for (int i = 0; i < sets; i++) {
        w.head[h].any[i] = any_attends(a, item, h, i, t0);
        plain &= w.head[h].any[i];
      }
    const Side keys = keys_in(a, item, here, place), values = values_in(a, item, here, place);
    const Side later_keys = keys_in(a, item, later ? *later : here, later_place);
    const Side *next = later ? &later_keys : nullptr, *after_keys = &values;
    if constexpr (C::shared_kv) after_keys = next; // the values are there with the keys
    score_heads(item, here, keys, after_keys, plain, w);
    for (int h = 0; h < item.heads; h++) {
      if constexpr (FACTORS)
        Base::load_factors(a, here, place.factors, item.head + h, Base::lanes_of(here), here.span, w.factors);
      for (int i = 0; i < sets; i++)
        if (w.head[h].any[i]) weigh_set(a, item, h, i, t0, Base::lanes_of(here), here.span, w);
    }
    if constexpr (AHEAD && FACTORS)
      if (later) Base::prefetch_factors(a, later_place.factors, item.head, item.heads, later->span);
    add_values(item, here, values, next, w);
  }

  // Finds where the tiles up to `tile` lie, those from `located` on.
  static PAGEGEN_INLINE void locate(const Args& a, const Item& item, int32_t tile, int32_t& located, Scratch& w) {
    for (; located <= tile; located++) {
      Tile& found = w.tiles[located % RING];
      Base::locate(a, item, located * TILE, found);
      if (found.live.any()) Base::find_places(a, found, w.places[located % RING]);
    }
  }

  static void by_tokens(const Args& a, const Item& item, int32_t first, int32_t last, Scratch& w) {
    int32_t located = first;
    for (int32_t tile = first; tile < last; tile++) {
      const int32_t later = std::min(tile + 1, last - 1);
      locate(a, item, later, located, w);
      const Tile &here = w.tiles[tile % RING], &there = w.tiles[later % RING];
      const Tile* next = later > tile && there.live.any() ? &there : nullptr;
      if (here.live.any())
        all_heads(a, item, tile * TILE, here, w.places[tile % RING], next, w.places[later % RING], w);
    }
  }

  static void by_heads(const Args& a, const Item& item, int32_t first, int32_t last, Scratch& w) {
    int32_t located = first;
    const int64_t units = (int64_t)(last - first) * item.heads; // a unit is one tile and one head
    for (int64_t u = 0; u < units; u++) {
      const int64_t later = std::min<int64_t>(u + C::prefetch_ahead, units - 1);
      const int32_t tile = first + u / item.heads, later_tile = first + later / item.heads;
      const int h = u % item.heads, later_h = later % item.heads;
      locate(a, item, later_tile, located, w);
      const Tile& here = w.tiles[tile % RING];
      if (!here.live.any()) continue;
      const int there = w.tiles[later_tile % RING].live.any() ? later_tile % RING : tile % RING;
      const Places &place = w.places[tile % RING], &later_place = w.places[there];
      Rows k = keys_in(a, item, here, place).rows(h), v = values_in(a, item, here, place).rows(h);
      const Rows next_k = keys_in(a, item, here, later_place).rows(later_h);
      const Rows next_v = values_in(a, item, here, later_place).rows(later_h);
      const Lanes& lanes = Base::lanes_of(here);
      const Span span = here.span;
      if (!here.live.whole()) {
        k = Base::live_rows(k, here, span, w.k_place);
        v = C::shared_kv ? k : Base::live_rows(v, here, span, w.v_place);
      }
      if constexpr (FACTORS) {
        if (AHEAD && later_tile > tile && later_h == 0) // of all heads, by the unit that first looks so far ahead
          Base::prefetch_factors(a, later_place.factors, item.head, item.heads, w.tiles[there].span);
        Base::load_factors(a, here, place.factors, item.head + h, lanes, span, w.factors);
      }
      one_tile(a, item, h, tile * TILE, lanes, span, k, v, next_k, next_v, w);
    }
  }

  static void run(const Args& a, const Item& item, float* partials, Scratch& w) {
    const int sets = item.queries * PARTS;
    for (int h = 0; h < item.heads; h++)
      for (int i = 0; i < sets; i++) {
        Base::load_query(a, item.token + i / PARTS, (item.head + h) * G + i % PARTS * R, w.head[h].query[i]);
        std::fill(w.head[h].state[i], w.head[h].state[i] + R, State{});
        std::memset(w.head[h].sums[i], 0, sizeof w.head[h].sums[i]);
      }
    if (item.key_end > item.key_begin) {
      const int32_t first = item.key_begin / TILE, last = ceil_div(item.key_end, TILE); // tiles
      if constexpr (BY_TOKENS) by_tokens(a, item, first, last, w);
      else by_heads(a, item, first, last, w);
    }
    alignas(64) float row[OUT];
    for (int h = 0; h < item.heads; h++)
      for (int i = 0; i < sets; i++)
        for (int r = 0; r < R; r++)
          Base::store_row(a, item, h, i * R + r, Base::ordered(w.head[h].sums[i][r], row), w.head[h].state[i][r],
                          partials);
  }
};

} // namespace
} // namespace pagegen
