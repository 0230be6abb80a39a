// The stream way, for few rows (decode): rows of K and V are used straight from the cache; a
// partial tile is copied first.
#pragma once

#include "bytes.hpp"
#include "words.hpp"

namespace pagegen {
namespace {

template <class C> using Products = std::conditional_t<Bytes<C>::SERVES, Bytes<C>, Words<C>>;

template <class C> struct Stream : Products<C> {
  using Base = Products<C>;
  using typename Base::AheadK, typename Base::AheadV, typename Base::Args, typename Base::Factors, typename Base::KV;
  using typename Base::Lanes, typename Base::Places, typename Base::Query, typename Base::Rows, typename Base::Span;
  using typename Base::State, typename Base::Tile, typename Base::Weights;
  using Base::AHEAD, Base::D, Base::DV, Base::FACTORS, Base::G, Base::OUT, Base::R, Base::STREAM_ROWS, Base::TILE;
  using Base::WIDTH;

  static constexpr int HEADS = C::heads_together;
  static constexpr int PARTS = G / R, SETS = std::max(1, STREAM_ROWS / R); // sets of R rows: of a query, of an item
  static constexpr int RING = C::prefetch_tiles + 1; // the present tile and those asked for ahead

  // What a unit asks for: rows of the unit that comes `ahead` units later, or (`whole`) its share of a later tile's
  // tokens, all heads.
  struct Next {
    Rows k, v;
    bool whole;
    int heads, lane;

    template <class Ahead> PAGEGEN_INLINE Ahead ahead(const Rows& rows, int width) const {
      const int row_lines = whole ? ceil_div(heads * width / kPack<KV> * (int)sizeof(KV), 64) : Ahead::LINES;
      return {rows, row_lines, lane};
    }
    PAGEGEN_INLINE AheadK keys() const { return ahead<AheadK>(k, D); }
    PAGEGEN_INLINE AheadV values() const { return ahead<AheadV>(v, DV); }
  };

  struct Head { // what an item keeps of one KV head: the rows of all its queries
    Query query[SETS];
    alignas(64) float sums[SETS][R][WIDTH];
    State state[SETS][R];
  };

  struct Scratch {
    Head head[HEADS];
    alignas(64) float score[R][TILE];
    Weights weights;
    alignas(64) KV k[TILE * D / kPack<KV>];
    alignas(64) KV v[C::shared_kv ? 1 : TILE * DV / kPack<KV>];
    Factors factors;
    Tile tiles[RING];
    Places places[RING];
  };

  // One tile and one KV head: every query of the item meets it.
  static void one_tile(const Args& a, const Item& item, int h, int32_t t0, const Lanes& lanes, Span span, const Rows& k,
                       const Rows& v, const Next& next, Scratch& w) {
    const int head = item.head + h;
    const float scale = a.scale * Base::head_scale(a.k_scale, head);
    Head& own = w.head[h];
    for (int i = 0; i < item.queries * PARTS; i++) {
      const int query = i / PARTS, first = head * G + i % PARTS * R;
      bool any = false; // heads differ only where a mask function says so
      for (int r = 0; r < (C::mask_range_by_head ? R : 1); r++) any |= Base::attends(a, item, query, first + r, t0);
      if (!any) continue;
      Base::scores(k, next.keys(), own.query[i], span, w.score);
      float decay[R];
      bool coarse = false; // whether what rounding left of the weights counts
      for (int r = 0; r < R; r++) {
        State& state = own.state[i][r];
        decay[r] = Base::weigh(a, item, query, first + r, t0, lanes, span, scale, own.query[i].sum[r], w.factors,
                               w.score[r], Base::weights_of(w.weights, r), state);
        coarse |= Base::prepare(w.weights, r, span, w.factors, state);
      }
      Base::values(v, next.values(), span, w.weights, decay, own.sums[i]);
      if (!coarse) continue;
      std::fill(decay, decay + R, 1.0f);
      for (int r = 0; r < R; r++) Base::prepare_rest(w.weights, r, span, w.factors, own.state[i][r]);
      Base::values(v, next.values(), span, w.weights, decay, own.sums[i]);
    }
  }

  static void run(const Args& a, const Item& item, float* partials, Scratch& w) {
    const Keys keys{item.key_begin, item.key_end};
    const int sets = item.queries * PARTS;
    for (int h = 0; h < item.heads; h++)
      for (int i = 0; i < sets; i++) {
        Base::load_query(a, item.token + i / PARTS, (item.head + h) * G + i % PARTS * R, w.head[h].query[i]);
        std::fill(w.head[h].state[i], w.head[h].state[i] + R, State{});
        std::memset(w.head[h].sums[i], 0, sizeof w.head[h].sums[i]);
      }
    const int32_t first = keys.begin / TILE, last = ceil_div(keys.end, TILE); // tiles
    const int64_t units = keys.end > keys.begin ? (int64_t)(last - first) * item.heads : 0;
    const KV* k_cache = (const KV*)a.k_cache + item.head * a.k_head_stride;
    const KV* v_cache = (const KV*)a.v_cache + item.head * a.v_head_stride;
    const bool whole = C::prefetch_tokens && item.heads > 1 && a.k_head_stride == D / kPack<KV> &&
                       (C::shared_kv || a.v_head_stride == DV / kPack<KV>);
    const int64_t ahead = C::prefetch_tiles * (whole ? item.heads : 1); // units
    int32_t located = first; // tiles before it have been located
    const auto locate = [&](int32_t tile) {
      for (; located <= tile; located++) {
        Tile& found = w.tiles[located % RING];
        Base::locate(a, item, located * TILE, found);
        if (found.live.any()) Base::find_places(a, found, w.factors, w.places[located % RING]);
      }
    };
    for (int64_t u = 0; u < units; u++) { // a unit is one tile and one head
      const int64_t later = std::min(u + ahead, units - 1);
      const int32_t tile = first + u / item.heads, later_tile = first + later / item.heads;
      const int h = u % item.heads, later_h = whole ? 0 : later % item.heads;
      locate(later_tile);
      const Tile& here = w.tiles[tile % RING];
      if (!here.live.any()) continue;
      const int there = w.tiles[later_tile % RING].live.any() ? later_tile % RING : tile % RING;
      const Places &place = w.places[tile % RING], &later_place = w.places[there];
      Rows k{k_cache + h * a.k_head_stride, place.k}, v{v_cache + h * a.v_head_stride, place.v};
      const Next next{{k_cache + later_h * a.k_head_stride, later_place.k},
                      {v_cache + later_h * a.v_head_stride, later_place.v},
                      whole,
                      item.heads,
                      whole ? h * TILE / item.heads : 0};
      const Lanes& lanes = Base::lanes_of(here);
      const Span span = here.span;
      if (!here.live.whole()) {
        k = Base::template stage<D>(k, here, span, w.k);
        if constexpr (!C::shared_kv) v = Base::template stage<DV>(v, here, span, w.v);
      }
      if constexpr (C::shared_kv) v = k;
      if constexpr (FACTORS) {
        // by the unit that first looks ahead to a later tile; a token's factors of all heads lie side by side
        if (AHEAD && later_tile > tile && (whole ? h == 0 : later_h == 0))
          Base::prefetch_factors(a, later_place.factors, item.head, w.factors);
        Base::load_factors(a, here, place.factors, item.head + h, lanes, span, w.factors);
      }
      one_tile(a, item, h, tile * TILE, lanes, span, k, v, next, w);
    }
    alignas(64) float row[OUT];
    for (int h = 0; h < item.heads; h++)
      for (int i = 0; i < sets; i++)
        for (int r = 0; r < R; r++)
          Base::leave(a, item, h, i * R + r, Base::ordered(w.head[h].sums[i][r], row), w.head[h].state[i][r], partials);
  }
};

} // namespace
} // namespace pagegen
