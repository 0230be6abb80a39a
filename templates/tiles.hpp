// Where the tokens of a tile lie, which of them may be read, and the factors that dequantise them.
#pragma once

#include "plan.hpp"

namespace pagegen {
namespace {

template <class C> struct Tiles : Plan<C> {
  using Base = Plan<C>;
  using typename Base::Args;
  using typename Base::KV;
  using Base::D, Base::DV, Base::FACTORS, Base::G, Base::RUN, Base::RUNS, Base::STREAM, Base::TILE;
  using Base::TOKEN_SCALES, Base::ZEROS;

  // The tokens of a tile that some row of the item attends; the others may be anything.
  struct Live {
    int32_t begin, end; // within the tile
    bool holes;         // whether only those in `some` are; it is not set otherwise
    bool some[TILE];

    PAGEGEN_INLINE bool operator()(int t) const { return t >= begin && t < end && (!holes || some[t]); }
    PAGEGEN_INLINE bool any() const { return begin < end; }
    PAGEGEN_INLINE bool whole() const { return begin <= 0 && end >= TILE && !holes; }
  };

  static Live live_in(const Args& a, const Item& item, int32_t t0) {
    Live live;
    live.begin = std::max(item.key_begin - t0, 0);
    live.end = std::min(item.key_end - t0, TILE);
    live.holes = false;
    if (C::mask_mod || own_in(a, item, t0)) drop_unseen(a, item, t0, live);
    return live;
  }

  // whether a tree decides over some of the tile's tokens
  static PAGEGEN_INLINE bool own_in(const Args& a, const Item& item, int32_t t0) {
    return a.tree_mask && item.own - t0 < TILE;
  }

  // Takes the tokens out that the mask function and the tree keep from every row of the item. A token is tried until
  // a row attends it: for most masks the first rows settle a tile.
  static void drop_unseen(const Args& a, const Item& item, int32_t t0, Live& live) {
    const Captured captured{a.captures};
    const int32_t length = a.seq_lens[item.sequence], own = own_in(a, item, t0) ? item.own - t0 : TILE;
    const int step = C::mask_by_head ? 1 : item.heads * G, last = (item.head + item.heads) * G;
    const int32_t first = live.begin, most = live.end - live.begin;
    int32_t seen = 0;
    std::fill(live.some, live.some + TILE, false);
    for (int i = 0; i < item.queries && seen < most; i++) {
      const uint8_t* tree = own < TILE ? a.tree_mask + (int64_t)(item.token + i) * a.tree_stride : nullptr;
      const int32_t position = item.position + i;
      for (int head = item.head * G; head < last && seen < most; head += step) {
        const Keys keys = Base::keys_of(a, item.sequence, head, position, length);
        const int32_t end = std::min(keys.end - t0, first + most);
        for (int32_t t = std::max(keys.begin - t0, first); t < end; t++) {
          if (live.some[t] || (t >= own && !tree[t - own])) continue;
          if (C::mask_mod && !Modifiers::mask(captured, item.sequence, head, position, t0 + t)) continue;
          live.some[t] = true;
          seen++;
        }
      }
    }
    while (live.begin < live.end && !live.some[live.begin]) live.begin++;
    while (live.begin < live.end && !live.some[live.end - 1]) live.end--;
    live.holes = seen < live.end - live.begin;
  }

  struct Span { // of lanes; whole steps of the arithmetic
    int begin, end;
  };
  static constexpr int STEP = 16; // a multiple of W and of the tokens that any step of the arithmetic takes

  struct Tile {
    int64_t k[RUNS], v[RUNS]; // of each run's first token, head 0
    int32_t block[FACTORS ? RUNS : 1], slot[FACTORS ? RUNS : 1];
    Live live;
    bool inside; // of the item's keys. Not by `live`: which heads share an item must not change an order of sums
    Span span;   // that holds them
  };

  // Runs without a live token get the place of one: their table entries may hold anything.
  static PAGEGEN_INLINE void locate(const Args& a, const Item& item, int32_t t0, Tile& tile) {
    const int32_t* table = a.block_table + item.sequence * a.table_stride;
    tile.live = live_in(a, item, t0);
    const int begin = std::max(item.key_begin - t0, 0), end = std::min(item.key_end - t0, TILE);
    tile.inside = begin == 0 && end == TILE;
    tile.span = {begin / STEP * STEP, round_up(end, STEP)};
    if (!tile.live.any()) return;
    for (int i = 0; i < RUNS; i++) {
      bool used = i * RUN < tile.live.end && (i + 1) * RUN > tile.live.begin;
      if (used && tile.live.holes) {
        const bool* some = tile.live.some + i * RUN;
        used = std::find(some, some + RUN, true) != some + RUN;
      }
      const uint32_t token = t0 + (used ? i * RUN : tile.live.begin);
      const uint32_t block = token / C::block_size, slot = token % C::block_size;
      tile.k[i] = table[block] * a.k_block_stride + slot * a.k_slot_stride;
      if constexpr (!C::shared_kv) tile.v[i] = table[block] * a.v_block_stride + slot * a.v_slot_stride;
      if constexpr (FACTORS) {
        tile.block[i] = table[block];
        tile.slot[i] = slot;
      }
    }
  }

  // The order of a tile's tokens: as they come, or lane t is token (t % streams) * STREAM + t / streams.
  struct Lanes {
    alignas(64) int32_t token[TILE];
    int32_t lane[TILE]; // of a token
    constexpr Lanes(bool streamed) : token{}, lane{} {
      for (int i = 0; i < TILE; i++) token[i] = streamed ? i % C::streams * STREAM + i / C::streams : i;
      for (int i = 0; i < TILE; i++) lane[token[i]] = i;
    }
  };
  static constexpr Lanes kStreamed{true}, kPlain{false};

  // What is read in the place of a token that nobody attends.
  alignas(64) static constexpr KV kZeroRow[std::max(D, DV)] = {};

  // What dequantises the tokens of a tile, by lane: value = (stored - zero) * scale.
  struct Factors {
    alignas(64) float k_scale[TOKEN_SCALES ? TILE : 1], v_scale[TOKEN_SCALES ? TILE : 1];
    alignas(64) float k_zero[ZEROS ? TILE : 1], v_zero[ZEROS ? TILE : 1];
  };

  template <class Visit> static PAGEGEN_INLINE void each_factor(const Args& a, Visit visit) {
    if constexpr (TOKEN_SCALES) {
      visit(0, a.k_scale, &Factors::k_scale);
      visit(1, C::shared_kv ? a.k_scale : a.v_scale, &Factors::v_scale);
    }
    if constexpr (ZEROS) {
      visit(2, a.k_zero, &Factors::k_zero);
      visit(3, C::shared_kv ? a.k_zero : a.v_zero, &Factors::v_zero);
    }
  }

  // Where the factors of a tile lie, by lane, from head 0: found once for all heads.
  struct FactorPlaces {
    int64_t place[FACTORS ? 4 : 1][FACTORS ? TILE : 1];
  };
  static void find_factors(const Args& a, const Tile& tile, const Lanes& lanes, FactorPlaces& to) {
    each_factor(a, [&](int n, const pagegen_factors& from, auto) __attribute__((always_inline)) {
      for (int i = 0; i < RUNS; i++)
        for (int j = 0; j < RUN; j++)
          to.place[n][lanes.lane[i * RUN + j]] =
              tile.block[i] * from.block_stride + (tile.slot[i] + j) * from.slot_stride;
    });
  }

  static void load_factors(const Args& a, const Tile& tile, const FactorPlaces& places, int head, const Lanes& lanes,
                           Span span, Factors& f) {
    const bool whole = tile.live.whole();
    each_factor(a, [&](int n, const pagegen_factors& from, auto own) __attribute__((always_inline)) {
      const float* first = from.data + head * from.head_stride;
      float* to = f.*own;
      for (int lane = span.begin; lane < span.end; lane++)
        to[lane] = whole || tile.live(lanes.token[lane]) ? first[places.place[n][lane]] : 0.0f;
    });
  }

  // Those of some lanes and heads. Where a token's heads lie side by side, a line holds 16.
  static void prefetch_factors(const Args& a, const FactorPlaces& places, int head, int heads, Span span) {
    each_factor(a, [&](int n, const pagegen_factors& from, auto) __attribute__((always_inline)) {
      for (int h = head; h < head + heads; h += 16)
        for (int lane = span.begin; lane < span.end; lane++)
          prefetch_line(from.data + h * from.head_stride + places.place[n][lane]);
    });
  }

  // what a head's stored keys, or values, are to be multiplied by; read where the head has a key
  static PAGEGEN_INLINE float head_scale(const pagegen_factors& from, int head) {
    return Base::HEAD_SCALES ? from.data[head * from.head_stride] : 1.0f;
  }

  static PAGEGEN_INLINE void prefetch_line(const void* line) { __builtin_prefetch(line, 0, C::prefetch_hint); }
  template <int WIDTH> static PAGEGEN_INLINE void prefetch(const KV* row) {
#pragma GCC unroll 8
    for (int b = 0; b < (int)(WIDTH / kPack<KV> * sizeof(KV)); b += 64) prefetch_line((const char*)row + b);
  }
};

} // namespace
} // namespace pagegen
