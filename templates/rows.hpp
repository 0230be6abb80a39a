// The rows of one tile of K or V and one head, as the stream way reads them and asks for them ahead.
#pragma once

#include "ends.hpp"

namespace pagegen {
namespace {

template <class C> struct TileRows : Ends<C> {
  using Base = Ends<C>;
  using typename Base::Args, typename Base::FactorPlaces, typename Base::Factors, typename Base::KV;
  using typename Base::Lanes, typename Base::Span, typename Base::Tile;
  using Base::D, Base::DV, Base::FACTORS, Base::RUN, Base::RUNS, Base::TILE;

  static constexpr int PADDED = std::bit_ceil((unsigned)Base::R); // rows, so that sums fill whole vectors
  static constexpr int TOKENS = std::max(1, W / PADDED), SUMS = PADDED * TOKENS; // scored at once

  // Whether byte products serve (bytes.hpp): 1.14 times as fast as pairs of bf16 for int8, as fast for int4 (Zen 4).
  // Queries of float32 keep their 24 bits; past 256 elements, or tokens of a tile, a sum could overflow.
  static constexpr bool PACKED = std::is_same_v<KV, s4x2>, INTEGERS = PACKED || std::is_same_v<KV, s8>;
#if defined(PAGEGEN_VNNI)
  static constexpr bool BYTES = C::dot && INTEGERS && !std::is_same_v<typename Base::Q, float> && D % 16 == 0 &&
                                D <= 256 && TILE <= 256;
#else
  static constexpr bool BYTES = false;
#endif
  static constexpr bool BY_TOKENS = C::read_tokens && !BYTES; // bytes' sums are of a whole tile
  // Lanes of one head that a step of reading by tokens takes. 16 at most: spans are whole steps.
  static constexpr int CHUNK = std::max({C::streams, TOKENS, 8});

  // A tile that is the item's as a whole is read in streams, another in order: what is the item's is a span of it then.
  static PAGEGEN_INLINE const Lanes& lanes_of(const Tile& tile) {
    return tile.inside ? Base::kStreamed : Base::kPlain;
  }

  // Where the rows of a tile lie, by lane: found once for all heads, since the way to a row is long beside
  // the two products that a row is used in.
  struct Places {
    int64_t k[TILE], v[C::shared_kv ? 1 : TILE]; // in elements, from head 0
    FactorPlaces factors;
  };
  static void find_places(const Args& a, const Tile& tile, Factors& f, Places& to) {
    const Lanes& lanes = lanes_of(tile);
    for (int i = 0; i < RUNS; i++)
      for (int j = 0; j < RUN; j++) {
        const int lane = lanes.lane[i * RUN + j];
        to.k[lane] = tile.k[i] + j * a.k_slot_stride;
        if constexpr (!C::shared_kv) to.v[lane] = tile.v[i] + j * a.v_slot_stride;
      }
    if constexpr (FACTORS) Base::find_factors(a, tile, lanes, f, to.factors);
  }

  struct Rows { // of one head
    const KV* base;
    const int64_t* place;
    PAGEGEN_INLINE const KV* row(int lane) const { return base + place[lane]; }
  };

  // What lies in unused slots (NaN, perhaps) is never multiplied, not even by 0: the rows of a partial tile, of zeros
  // where no row of the item attends a token.
  static Rows live_rows(const Rows& from, const Tile& tile, Span span, int64_t* place) {
    alignas(64) static constexpr KV nothing[std::max(D, DV) + 2] = {}; // the cache may lie a fraction of an element off
    const int64_t away = ((const char*)(nothing + 1) - (const char*)from.base) / (int64_t)sizeof(KV);
    const Lanes& lanes = lanes_of(tile);
    for (int lane = span.begin; lane < span.end; lane++)
      place[lane] = tile.live(lanes.token[lane]) ? from.place[lane] : away;
    return {from.base, place};
  }

  // Asks for the lines of a later tile, a few at every step of the arithmetic: asked in bursts they fill the queue of
  // misses, where loads of the present tile then wait too. (Evenly asked: 1.06 times the bandwidth on one thread. A
  // line or two every few products, not all of four tokens before theirs: float8 another 1.05 to 1.12, float32 1.03.)
  template <int WIDTH> struct Ahead {
    static constexpr int LINES = ceil_div(WIDTH / kPack<KV> * (int)sizeof(KV), 64); // of one row
    Rows rows;
    int lane = 0, end = TILE; // those to ask for
    int begin = 0;            // the first lane that is computed

    // The lines that belong to STEP tokens from t on, in one of PASSES passes over the lanes that are computed: of
    // PARTS that they are asked for in, one.
    template <int STEP, int PASSES, int PARTS = 1>
    PAGEGEN_INLINE void ask(int t, int pass, int part = 0) const {
      if constexpr (C::prefetch_ahead > 0 && LINES > 0) {
        constexpr int LANES = BY_TOKENS ? CHUNK : TILE, MANY = ceil_div(LINES * STEP, PASSES);
        constexpr int TOGETHER = fitting(std::min(LINES, ceil_div(MANY, PARTS))); // lines of one row
        constexpr int COUNT = round_up(MANY, TOGETHER), EACH = ceil_div(COUNT / TOGETHER, PARTS);
        constexpr bool WHOLE = COUNT % LINES == 0; // rows
        // unsigned: of what may be negative or wrap around, a quotient takes several instructions
        const unsigned step = pass * (LANES / STEP) + (unsigned)(BY_TOKENS ? t - begin : t) / STEP;
#pragma GCC unroll 16
        for (int i = 0; i < EACH; i++) {
          const unsigned n = (part * EACH + i) * TOGETHER;
          if (EACH * PARTS * TOGETHER != COUNT && n >= COUNT) return;
          const int row = lane + (WHOLE ? step * (COUNT / LINES) + n / LINES : (step * COUNT + n) / LINES);
          if ((BY_TOKENS || COUNT * PASSES != LINES * STEP) && row >= end) return;
          ask_for<TOGETHER>(row, (WHOLE ? n : step * COUNT + n) % LINES);
        }
      }
    }
    template <int COUNT> PAGEGEN_INLINE void ask_for(int lane, int line) const {
      const char* from = (const char*)rows.row(lane) + line * 64;
#pragma GCC unroll 16
      for (int j = 0; j < COUNT; j++) Base::prefetch_line(from + j * 64);
    }
    static constexpr int fitting(int count) { // the next divisor of LINES
      while (LINES % count) count++;
      return count;
    }
  };
  using AheadK = Ahead<D>;
  using AheadV = Ahead<C::shared_kv ? 0 : DV>; // a shared cache's values were asked for as keys
};

} // namespace
} // namespace pagegen
