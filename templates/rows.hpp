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
  // Lanes of one head that a step of reading by tokens takes.
  static constexpr int CHUNK = std::max({C::streams, TOKENS, 8});
  static_assert(Base::STEP % CHUNK == 0); // spans are whole steps

  // Partial tiles are read in order, so that the item's tokens are adjacent lanes (a span).
  static PAGEGEN_INLINE const Lanes& lanes_of(const Tile& tile) {
    return tile.inside ? Base::kStreamed : Base::kPlain;
  }

  // Where the rows of a tile lie, by lane: found once for all heads, since the way to a row is long beside
  // the two products that a row is used in.
  struct Places {
    int64_t k[TILE], v[C::shared_kv ? 1 : TILE]; // in bytes, from head 0
    FactorPlaces factors;
  };
  static void find_places(const Args& a, const Tile& tile, Places& to) {
    const Lanes& lanes = lanes_of(tile);
    for (int i = 0; i < RUNS; i++)
      for (int j = 0; j < RUN; j++) {
        const int lane = lanes.lane[i * RUN + j];
        to.k[lane] = (tile.k[i] + j * a.k_slot_stride) * sizeof(KV);
        if constexpr (!C::shared_kv) to.v[lane] = (tile.v[i] + j * a.v_slot_stride) * sizeof(KV);
      }
    if constexpr (FACTORS) Base::find_factors(a, tile, lanes, to.factors);
  }

  struct Rows { // of one head
    uintptr_t base; // a number, since a place may be that of the row of zeros
    const int64_t* place;
    PAGEGEN_INLINE const KV* row(int lane) const { return (const KV*)(base + place[lane]); }
  };

  // What lies in unused slots (NaN, perhaps) is never multiplied, not even by 0: the rows of a partial tile, of zeros
  // where no row of the item attends a token.
  static Rows live_rows(const Rows& from, const Tile& tile, Span span, int64_t* place) {
    const int64_t zeros = (uintptr_t)Base::kZeroRow - from.base;
    const Lanes& lanes = lanes_of(tile);
    for (int lane = span.begin; lane < span.end; lane++)
      place[lane] = tile.live(lanes.token[lane]) ? from.place[lane] : zeros;
    return {from.base, place};
  }

  static constexpr int lines_of(int width) { return ceil_div(width / kPack<KV> * (int)sizeof(KV), 64); }

  // Prefetches the lines of a later tile, a few at every step of the arithmetic: in bursts they fill the queue of
  // misses, where loads of the present tile then wait too. (Evenly spread: 1.06 times the bandwidth on one thread. A
  // line or two every few products, not all of four tokens before theirs: float8 another 1.05 to 1.12, float32 1.03.)
  template <int WIDTH> struct Prefetch {
    static constexpr int LINES = TileRows::lines_of(WIDTH); // of one row
    Rows rows;
    int lane = 0, end = TILE; // those to prefetch
    int begin = 0;            // the first lane that is computed
    int lines = LINES;        // that a row has, where K and V differ

    // A tile's lines are divided evenly over PASSES passes of the arithmetic, each pass over its steps of STEP tokens,
    // each step over its places: these are the lines of one such place. PLACES are those of a step of this pass, FINEST
    // those of the pass that has most.
    template <int STEP, int PASSES, int PLACES = 1, int FINEST = PLACES>
    PAGEGEN_INLINE void issue(int t, int pass, int place = 0) const {
      if constexpr (C::prefetch_ahead > 0 && LINES > 0) {
        constexpr int LANES = BY_TOKENS ? CHUNK : TILE, MANY = ceil_div(LINES * STEP, PASSES);
        constexpr int TOGETHER = fitting(std::min(LINES, ceil_div(MANY, FINEST))); // lines of one row
        constexpr int COUNT = round_up(MANY, TOGETHER), EACH = ceil_div(COUNT / TOGETHER, PLACES);
        constexpr bool WHOLE = COUNT % LINES == 0; // rows
        // unsigned: of what may be negative or wrap around, a quotient takes several instructions
        const unsigned step = pass * (LANES / STEP) + (unsigned)(BY_TOKENS ? t - begin : t) / STEP;
#pragma GCC unroll 16
        for (int i = 0; i < EACH; i++) {
          const unsigned n = (place * EACH + i) * TOGETHER;
          if (EACH * PLACES * TOGETHER != COUNT && n >= COUNT) return;
          const int row = lane + (WHOLE ? step * (COUNT / LINES) + n / LINES : (step * COUNT + n) / LINES);
          // By head, a kernel of one set of rows that divides evenly goes without the check: int4 takes 1.05 times as
          // long with it. By token, the branch is what keeps g++ from gathering requests: 0.95 on one thread.
          if ((BY_TOKENS || Base::G > Base::R || COUNT * PASSES != LINES * STEP) && row >= end) return;
          issue_row<TOGETHER>(row, (WHOLE ? n : step * COUNT + n) % LINES);
        }
      }
    }
    template <int COUNT> PAGEGEN_INLINE void issue_row(int lane, int line) const {
      const char* from = (const char*)rows.row(lane) + line * 64;
#pragma GCC unroll 16
      for (int j = 0; j < COUNT; j++)
        if (!UNEVEN || line + j < lines) Base::prefetch_line(from + j * 64);
    }
    static constexpr int fitting(int count) { // the next divisor of LINES
      while (LINES % count) count++;
      return count;
    }
  };
  // By tokens, keys are followed by values and these by the next keys: either prefetches the other.
  static constexpr bool UNEVEN = BY_TOKENS && !C::shared_kv && lines_of(D) != lines_of(DV);
  using PrefetchK = Prefetch<UNEVEN ? std::max(D, DV) : D>;
  // a shared cache's values were prefetched as keys
  using PrefetchV = Prefetch<C::shared_kv ? 0 : UNEVEN ? std::max(D, DV) : DV>;
};

} // namespace
} // namespace pagegen
