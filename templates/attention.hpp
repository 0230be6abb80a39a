// Paged attention on CPUs: decode, prefill and ragged mixtures of both over a block table.
//
// Layouts, in elements; every last dimension has stride 1, all other strides are arguments:
//   q, out      [total_q, num_q_heads, head_dim or v_head_dim]
//   k, v cache  [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]; int4: two a byte, low nibble first;
//               a shared cache has no v: a value is the first v_head_dim elements of its key
//   scale, zero float32 [num_blocks, block_size, num_kv_heads]: value = (stored - zero) * scale
//   block_table int32 [num_seqs, max_blocks]; entries past ceil(seq_len / block_size) are never read
//   lse         float32 [total_q, num_q_heads], natural logarithm
//
// A work item is (sequence, run of queries, KV head or several, range of keys). The query heads that share a KV
// head are computed together, so K and V are read once a group. Two ways to compute an item:
//   stream  few rows (decode): rows of K and V are used straight from the cache, several token streams at a
//           time, while lines of a later tile are asked into L2. Bound by memory.
//   panel   many rows (prefill, large groups): a tile of K and V is packed once into panels that stay in L1/L2
//           and meets all rows of the item in register blocks. Bound by arithmetic.
// A score is scaled, capped, gets its ALiBi and then the score function's change; causality, window, tree and mask
// function decide which are kept. Keys that no row of an item may attend are not read, values neither: 0 * NaN would
// be NaN. A value that is not finite reaches the rows of its item that attend its key, and may reach the others.
// Softmax state, sums and partial results are float32. Which way serves a sequence, where its tiles and splits begin
// and the order in which splits are merged depend on that sequence alone: not on the number of threads, on its
// neighbours in the batch or on where its blocks lie. So results are bitwise reproducible.
//
// The parts: vectors.hpp, narrow.hpp (quantised elements), products.hpp, call.hpp (arguments, score and mask
// functions), plan.hpp (work items), tiles.hpp (where tokens lie), softmax.hpp; the two ways are here.
//
// Build: c++ -O3 -march=native -std=c++20 -fopenmp -ffp-contract=off -shared -fPIC
// (contraction off: `x * scale - max` must not become a fused operation, or a score of 1e30 overflows)
#pragma once

#include "softmax.hpp"

#include <cstddef>
#include <omp.h>

namespace pagegen {
namespace { // internal: two kernels in one process must not share a symbol, and templates' statics would be shared

// What is specialised. The generator rewrites these values by name, and the members of struct
// Captured and the results of struct Modifiers (call.hpp) where a spec has such functions.
struct Constants {
  static constexpr Dtype q_dtype = Dtype::bfloat16;
  static constexpr Dtype kv_dtype = Dtype::bfloat16;
  static constexpr int num_kv_heads = 8;
  static constexpr int group = 4; // query heads a KV head
  static constexpr int head_dim = 128;
  static constexpr int v_head_dim = 128;
  static constexpr int block_size = 16; // tokens a block
  static constexpr bool shared_kv = false; // values are the first columns of keys
  static constexpr Scales kv_scales = Scales::none;
  static constexpr bool zero_points = false;
  static constexpr bool causal = true;
  static constexpr int window = 0;             // keys a query attends, itself included; 0: all
  static constexpr float logit_softcap = 0.0f; // 0: none
  static constexpr bool alibi = false;
  static constexpr bool sinks = false;
  static constexpr bool score_mod = false;
  static constexpr bool mask_mod = false;
  static constexpr bool mask_by_head = false;       // whether it depends on the head
  static constexpr bool mask_range = false;         // whether the mask function bounds the keys
  static constexpr bool mask_range_by_head = false; // whether those bounds depend on the head
  static constexpr int tile_kv = 64;         // keys scored at once
  static constexpr int streams = 4;          // places of a tile read side by side (stream way)
  static constexpr int prefetch_tiles = 1;   // how far ahead lines are asked into L2; 0: never
  static constexpr int split_tokens = 2048;  // keys an item covers at most, where a sequence has few queries
  static constexpr int heads_together = 1;   // KV heads an item of the stream way takes at most
};

template <class C> struct Attention : Softmax<C> {
  using Base = Softmax<C>;
  using typename Base::Args, typename Base::Factors, typename Base::KV, typename Base::Lanes, typename Base::M;
  using typename Base::Q, typename Base::State, typename Base::Tile, typename Base::Weight;
  using Word = typename M::Word;
  using VWord = typename M::VWord;
  using Base::D, Base::DV, Base::FACTORS, Base::G, Base::INF, Base::LN2, Base::LOG2E, Base::MR, Base::OUT, Base::RUN;
  using Base::RUNS, Base::STATE, Base::STREAM, Base::STREAM_ROWS, Base::TILE, Base::VECTORS, Base::ZEROS;
  using Base::KEY_FULL, Base::KEY_LANES, Base::KEY_TAIL, Base::KEY_WORDS;
  using Base::VALUE_FULL, Base::VALUE_LANES, Base::VALUE_TAIL, Base::PANEL_QUERIES, Base::PANEL_ROWS;

  // the place of a column in a row of the cache
  static PAGEGEN_INLINE const KV* at(const KV* row, int column) { return row + column / kPack<KV>; }

  // N columns of `step` value rows, from `column` on
  template <int N> static PAGEGEN_INLINE void load_values(const KV* const* row, int column, VWord* out) {
    const KV* from[M::step];
#pragma GCC unroll 2
    for (int j = 0; j < M::step; j++) from[j] = at(row[j], column);
    M::template load_values<N>(from, out);
  }

  // The rows of one tile and head, in the order the stream way takes them: see Lanes.
  struct Rows {
    const KV* base[RUNS];
    int64_t stride;

    static PAGEGEN_INLINE int token(int lane) { return lane % C::streams * STREAM + lane / C::streams; }
    PAGEGEN_INLINE const KV* row(int lane) const {
      const int t = token(lane);
      return base[t / RUN] + t % RUN * stride;
    }
  };
  static PAGEGEN_INLINE Rows rows_at(const KV* cache, const int64_t (&runs)[RUNS], int64_t stride) {
    Rows rows;
    for (int i = 0; i < RUNS; i++) rows.base[i] = cache + runs[i];
    rows.stride = stride;
    return rows;
  }

  // Copies the live rows of a partial tile and zeroes the others: what lies in unused slots (NaN, perhaps) is
  // never multiplied, not even by 0.
  template <int WIDTH> static Rows stage(const Rows& from, const Tile& tile, KV* buffer) {
    constexpr int STORED = WIDTH / kPack<KV>;
    Rows rows;
    for (int t = 0; t < TILE; t++) {
      KV* to = buffer + t * STORED;
      if (tile.live(t)) std::memcpy(to, from.base[t / RUN] + t % RUN * from.stride, STORED * sizeof(KV));
      else std::memset((void*)to, 0, STORED * sizeof(KV));
    }
    for (int i = 0; i < RUNS; i++) rows.base[i] = buffer + i * RUN * STORED;
    rows.stride = STORED;
    return rows;
  }

  // ---- the stream way ------------------------------------------------------------------------------------

  static constexpr int HEADS = C::heads_together;
  static constexpr bool AHEAD = C::prefetch_tiles > 0;
  static constexpr int SLOTS = 16; // tiles located ahead: more than the farthest prefetch (8)
  static constexpr int GP = G <= 1 ? 1 : G <= 2 ? 2 : G <= 4 ? 4 : 8; // rows, so that sums fill whole vectors
  static constexpr int TOKENS = std::max(1, W / GP);                  // scored at once

  struct StreamScratch {
    alignas(64) Word q[HEADS][STREAM_ROWS][KEY_WORDS];
    alignas(64) float sums[HEADS][STREAM_ROWS][OUT];
    alignas(64) float score[STREAM_ROWS][TILE];
    alignas(64) Weight weight[STREAM_ROWS][TILE];
    alignas(64) KV k[TILE * D / kPack<KV>];
    alignas(64) KV v[C::shared_kv ? 1 : TILE * DV / kPack<KV>];
    Factors factors;
    State state[HEADS][STREAM_ROWS];
    float q_sum[HEADS][STREAM_ROWS];
    Tile tiles[SLOTS];
  };

  static void stream_scores(const Rows& k, const Rows& next, const Word (*q)[KEY_WORDS], float (*score)[TILE]) {
    for (int t = 0; t < TILE; t += TOKENS) {
      const KV* row[TOKENS];
      vf sum[GP * TOKENS] = {};
#pragma GCC unroll 16
      for (int j = 0; j < TOKENS; j++) {
        row[j] = k.row(t + j);
        if constexpr (AHEAD) Base::template prefetch<D>(next.row(t + j));
      }
      const auto add = [&]<int VECTORS>(auto loader, int vector) __attribute__((always_inline)) {
        VWord key[TOKENS][VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < TOKENS; j++) loader(at(row[j], vector * KEY_LANES), key[j]);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
#pragma GCC unroll 2
          for (int i = 0; i < VECTORS; i++) {
            const VWord query = M::load_words(q[g] + (vector + i) * W);
#pragma GCC unroll 16
            for (int j = 0; j < TOKENS; j++) sum[g * TOKENS + j] = M::dot(sum[g * TOKENS + j], key[j][i], query);
          }
        }
      };
      constexpr int AT_ONCE = M::key_vectors, MANY = KEY_FULL / AT_ONCE * AT_ONCE;
#pragma GCC unroll 4
      for (int i = 0; i < MANY; i += AT_ONCE)
        add.template operator()<AT_ONCE>([](const KV* p, VWord* out) { M::load_keys(p, out); }, i);
      if constexpr (MANY < KEY_FULL)
        add.template operator()<1>([](const KV* p, VWord* out) { *out = M::template load_row<KEY_LANES>(p); }, MANY);
      if constexpr (KEY_TAIL > 0)
        add.template operator()<1>([](const KV* p, VWord* out) { *out = M::template load_row<KEY_TAIL>(p); }, KEY_FULL);
      alignas(64) float all[GP * TOKENS];
#pragma GCC unroll 8
      for (int i = 0; i < GP * TOKENS; i += W) store(all + i, sum_each(sum + i));
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) std::memcpy(&score[g][t], all + g * TOKENS, TOKENS * sizeof(float));
    }
  }

  // Sums of rows r0 .. r0 + ROWS over COLUMNS accumulator vectors from column c0 on, kept in registers.
  template <int ROWS, int COLUMNS, bool FIRST>
  static PAGEGEN_INLINE void stream_block(const Rows& v, const Rows& next, int r0, int c0, const Weight (*weight)[TILE],
                                          const float* decay, float (*sums)[OUT]) {
    vf sum[ROWS][COLUMNS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = vf{};
    for (int t = 0; t < TILE; t += M::step) {
      const KV* row[M::step];
#pragma GCC unroll 2
      for (int j = 0; j < M::step; j++) {
        row[j] = v.row(t + j);
        if constexpr (FIRST && AHEAD && !C::shared_kv) // the columns taken here: requests come evenly
          Base::template prefetch<std::min(COLUMNS * W, DV)>(at(next.row(t + j), c0));
      }
      VWord p[ROWS];
#pragma GCC unroll 24
      for (int r = 0; r < ROWS; r++) {
        Word word;
        std::memcpy(&word, &weight[r0 + r][t], sizeof(Word));
        p[r] = M::broadcast(word);
      }
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c += M::value_vectors) {
        VWord value[M::value_vectors];
        const int column = c0 + c * W;
        if (VALUE_TAIL == 0 || column + VALUE_LANES <= DV) load_values<VALUE_LANES>(row, column, value);
        else if constexpr (VALUE_TAIL > 0) load_values<VALUE_TAIL>(row, column, value);
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
        store(to, fma(load(to), splat(decay[r0 + r]), sum[r][c])); // older sums last: fewer roundings of large numbers
      }
  }

  // Whole value rows at a time where the registers allow: half a row a time costs a third of the bandwidth. Narrow
  // elements are converted once for more rows instead.
  static constexpr int ROWS_AT_ONCE = std::min(G, sizeof(KV) == 1 ? 8 : 2);
  static constexpr int COLUMNS_AT_MOST = kAccumulators / ROWS_AT_ONCE / M::value_vectors * M::value_vectors;
  static constexpr int COLUMN_PART =
      round_up(even_part(VECTORS, std::max(M::value_vectors, COLUMNS_AT_MOST)), M::value_vectors);
  static constexpr int COLUMN_REST = VECTORS % COLUMN_PART;
  static constexpr int ROW_PART = G > 8 ? 1 : even_part(G, std::max(1, kAccumulators / COLUMN_PART));
  static constexpr int ROW_REST = G % ROW_PART;

  template <int COLUMNS>
  static void stream_column(const Rows& v, const Rows& next, int c0, const Weight (*weight)[TILE], const float* decay,
                            float (*sums)[OUT]) {
    stream_block<ROW_PART, COLUMNS, true>(v, next, 0, c0, weight, decay, sums);
    for (int r = ROW_PART; r + ROW_PART <= G; r += ROW_PART)
      stream_block<ROW_PART, COLUMNS, false>(v, next, r, c0, weight, decay, sums);
    if constexpr (ROW_REST > 0)
      stream_block<ROW_REST, COLUMNS, false>(v, next, G - ROW_REST, c0, weight, decay, sums);
  }

  static void stream_values(const Rows& v, const Rows& next, const Weight (*weight)[TILE], const float* decay,
                            float (*sums)[OUT]) {
    for (int c = 0; c + COLUMN_PART <= VECTORS; c += COLUMN_PART)
      stream_column<COLUMN_PART>(v, next, c * W, weight, decay, sums);
    if constexpr (COLUMN_REST > 0)
      stream_column<COLUMN_REST>(v, next, (VECTORS - COLUMN_REST) * W, weight, decay, sums);
  }

  // One tile and one KV head: every query of the item meets it.
  static void stream_tile(const Args& a, const Item& item, int h, int32_t t0, const Rows& k, const Rows& v,
                          const Rows& next_k, const Rows& next_v, StreamScratch& w) {
    const int head = item.head + h;
    const float scale = a.scale * Base::head_scale(a.k_scale, head);
    for (int i = 0; i < item.queries; i++) {
      const int r0 = i * G;
      bool any = false; // heads differ only where a mask function says so
      for (int g = 0; g < (C::mask_range_by_head ? G : 1); g++) any |= Base::attends(a, item, i, head * G + g, t0);
      if (!any) continue;
      stream_scores(k, next_k, w.q[h] + r0, w.score);
      float decay[STREAM_ROWS];
      for (int g = 0; g < G; g++)
        decay[g] = Base::weigh(a, item, i, head * G + g, t0, Base::kStreamed, scale, w.q_sum[h][r0 + g], w.factors,
                               w.score[g], w.weight[g], w.state[h][r0 + g]);
      stream_values(v, next_v, w.weight, decay, w.sums[h] + r0);
    }
  }

  static void stream_item(const Args& a, const Item& item, float* partials, StreamScratch& w) {
    const Keys keys{item.key_begin, item.key_end};
    const int rows = item.queries * G;
    for (int h = 0; h < item.heads; h++) {
      for (int r = 0; r < rows; r++)
        w.q_sum[h][r] = load_query(a, item.token + r / G, (item.head + h) * G + r % G, w.q[h][r]);
      std::fill(w.state[h], w.state[h] + rows, State{});
      std::memset(w.sums[h], 0, sizeof(float) * rows * OUT);
    }
    const int32_t first = keys.begin / TILE, last = ceil_div(keys.end, TILE); // tiles
    const int64_t units = keys.end > keys.begin ? (int64_t)(last - first) * item.heads : 0;
    const KV* k_cache = (const KV*)a.k_cache + item.head * a.k_head_stride;
    const KV* v_cache = (const KV*)a.v_cache + item.head * a.v_head_stride;
    int32_t located = first; // tiles before it have been located
    for (int64_t u = 0; u < units; u++) { // a unit is one tile and one head
      const int64_t next = std::min(u + C::prefetch_tiles, units - 1);
      const int32_t tile = first + u / item.heads, next_tile = first + next / item.heads;
      const int h = u % item.heads, next_h = next % item.heads;
      for (; located <= next_tile; located++) Base::locate(a, item, located * TILE, w.tiles[located % SLOTS]);
      const Tile& here = w.tiles[tile % SLOTS];
      if (!here.live.any()) continue;
      const Tile& there = w.tiles[next_tile % SLOTS].live.any() ? w.tiles[next_tile % SLOTS] : here;
      Rows k = rows_at(k_cache + h * a.k_head_stride, here.k, a.k_slot_stride);
      Rows v = rows_at(v_cache + h * a.v_head_stride, here.v, a.v_slot_stride);
      const Rows next_k = rows_at(k_cache + next_h * a.k_head_stride, there.k, a.k_slot_stride);
      const Rows next_v = rows_at(v_cache + next_h * a.v_head_stride, there.v, a.v_slot_stride);
      if (!here.live.whole()) {
        k = stage<D>(k, here, w.k);
        if constexpr (!C::shared_kv) v = stage<DV>(v, here, w.v);
      }
      if constexpr (C::shared_kv) v = k;
      if constexpr (FACTORS) {
        if (AHEAD) Base::prefetch_factors(a, there, item.head + next_h, w.factors);
        Base::load_factors(a, here, item.head + h, Base::kStreamed, w.factors);
      }
      stream_tile(a, item, h, tile * TILE, k, v, next_k, next_v, w);
    }
    for (int h = 0; h < item.heads; h++)
      for (int r = 0; r < rows; r++) leave(a, item, h, r, w.sums[h][r], w.state[h][r], partials);
  }

  // ---- the panel way -------------------------------------------------------------------------------------

  struct PanelScratch {
    alignas(64) Word q[PANEL_ROWS][KEY_WORDS];
    alignas(64) float sums[PANEL_ROWS][OUT];
    alignas(64) Word k[KEY_WORDS][TILE];           // transposed: words of the head dimension by tokens
    alignas(64) Word v[TILE / M::step][OUT];
    alignas(64) float score[MR][TILE];
    alignas(64) Weight weight[MR][TILE];
    Factors factors;
    State state[PANEL_ROWS];
    float q_sum[PANEL_ROWS];
  };

  // Packs the live rows of K and V, and zeroes for the others: NaN in an unused slot must not be read.
  static void pack(const Args& a, const Tile& tile, const KV* k_cache, const KV* v_cache, PanelScratch& w) {
    static constexpr KV nothing[std::max(D, DV)] = {};
    const auto row = [&](const KV* cache, const int64_t* runs, int64_t stride, int t) __attribute__((always_inline)) {
      return tile.live(t) ? cache + runs[t / RUN] + t % RUN * stride : nothing;
    };
    for (int t = 0; t < TILE; t += W) {
      const KV* rows[W];
      for (int j = 0; j < W; j++) rows[j] = row(k_cache, tile.k, a.k_slot_stride, t + j);
      const auto turn = [&](auto loader, int vector) __attribute__((always_inline)) {
        VWord loaded[W];
        vi words[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
          loaded[j] = loader(at(rows[j], vector * KEY_LANES));
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
      for (int i = 0; i < KEY_FULL; i++) turn([](const KV* p) { return M::template load_row<KEY_LANES>(p); }, i);
      if constexpr (KEY_TAIL > 0) turn([](const KV* p) { return M::template load_row<KEY_TAIL>(p); }, KEY_FULL);
    }
    for (int t = 0; t < TILE && !C::shared_kv; t += M::step) {
      const KV* rows[M::step];
      for (int j = 0; j < M::step; j++) rows[j] = row(v_cache, tile.v, a.v_slot_stride, t + j);
      VWord words[M::value_vectors];
      for (int i = 0; i < VALUE_FULL; i++) {
        load_values<VALUE_LANES>(rows, i * VALUE_LANES, words);
        store_values(words, w.v[t / M::step] + i * VALUE_LANES);
      }
      if constexpr (VALUE_TAIL > 0) {
        load_values<VALUE_TAIL>(rows, VALUE_FULL * VALUE_LANES, words);
        store_values(words, w.v[t / M::step] + VALUE_FULL * VALUE_LANES);
      }
    }
  }

  static PAGEGEN_INLINE void store_values(const VWord* words, Word* to) {
    for (int i = 0; i < M::value_vectors; i++) M::store_words(to + i * W, words[i]);
  }

  // c[MR][VECTORS * W] = c * decay (or 0) + a[MR][STEPS] b[STEPS][...], the product in registers
  template <int VECTORS_, int STEPS, int A_STRIDE, int B_STRIDE, int C_STRIDE, bool FRESH>
  static PAGEGEN_INLINE void multiply(const Word* a, const Word* b, float* c, const float* decay) {
    vf sum[MR][VECTORS_];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_; j++) sum[r][j] = vf{};
#pragma GCC unroll 2
    for (int k = 0; k < STEPS; k++) {
      VWord right[VECTORS_];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_; j++) right[j] = M::load_words(b + k * B_STRIDE + j * W);
#pragma GCC unroll 8
      for (int r = 0; r < MR; r++) {
        const VWord left = M::broadcast(a[r * A_STRIDE + k]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS_; j++) sum[r][j] = M::dot(sum[r][j], right[j], left);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_; j++) {
        float* to = c + r * C_STRIDE + j * W;
        store(to, FRESH ? sum[r][j] : fma(load(to), splat(decay[r]), sum[r][j]));
      }
  }

  // A float32 score is summed in parts: a chain of 128 additions is off by 2.6 times what torch's SDPA is.
  static void panel_scores(const Word* q, PanelScratch& w) {
    constexpr int PART = std::min(kPanelVectors, TILE / W), WORDS = ceil_div(D, M::step);
    constexpr int CHAIN = std::min(WORDS, M::step == 1 ? 32 : 288), REST = WORDS % CHAIN;
    float kept[MR];
    std::fill(kept, kept + MR, 1.0f);
    for (int t = 0; t < TILE; t += PART * W) {
      float* score = &w.score[0][t];
      multiply<PART, CHAIN, KEY_WORDS, TILE, TILE, true>(q, &w.k[0][t], score, kept);
      for (int i = CHAIN; i + CHAIN <= WORDS; i += CHAIN)
        multiply<PART, CHAIN, KEY_WORDS, TILE, TILE, false>(q + i, &w.k[i][t], score, kept);
      if constexpr (REST > 0)
        multiply<PART, REST, KEY_WORDS, TILE, TILE, false>(q + WORDS - REST, &w.k[WORDS - REST][t], score, kept);
    }
  }

  static void panel_values(float* sums, const float* decay, PanelScratch& w) {
    constexpr int PART = even_part(VECTORS, kPanelVectors), REST = VECTORS % PART;
    const Word* weight = (const Word*)&w.weight[0][0];
    for (int c = 0; c + PART <= VECTORS; c += PART)
      multiply<PART, TILE / M::step, TILE / M::step, OUT, OUT, false>(weight, &w.v[0][c * W], sums + c * W, decay);
    if constexpr (REST > 0) {
      constexpr int c = VECTORS - REST;
      multiply<REST, TILE / M::step, TILE / M::step, OUT, OUT, false>(weight, &w.v[0][c * W], sums + c * W, decay);
    }
  }

  static void panel_tile(const Args& a, const Item& item, int32_t t0, float scale, PanelScratch& w) {
    const int rows = item.queries * G;
    for (int r0 = 0; r0 < rows; r0 += MR) {
      const int count = std::min(MR, rows - r0);
      bool any = false;
      for (int r = r0; r < r0 + count; r++) any |= Base::attends(a, item, r / G, item.head * G + r % G, t0);
      if (!any) continue;
      panel_scores(w.q[r0], w);
      float decay[MR];
      for (int r = 0; r < count; r++)
        decay[r] = Base::weigh(a, item, (r0 + r) / G, item.head * G + (r0 + r) % G, t0, Base::kPlain, scale,
                               w.q_sum[r0 + r], w.factors, w.score[r], w.weight[r], w.state[r0 + r]);
      for (int r = count; r < MR; r++) {
        decay[r] = 1.0f;
        std::memset((void*)w.weight[r], 0, sizeof w.weight[r]);
      }
      panel_values(w.sums[r0], decay, w);
    }
  }

  static void panel_item(const Args& a, const Item& item, float* partials, PanelScratch& w) {
    const int32_t begin = item.key_begin, end = item.key_end;
    const int rows = item.queries * G, padded = round_up(rows, MR);
    for (int r = 0; r < rows; r++)
      w.q_sum[r] = load_query(a, item.token + r / G, item.head * G + r % G, w.q[r]);
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
        if constexpr (FACTORS) Base::load_factors(a, tile, item.head, Base::kPlain, w.factors);
      }
      if (AHEAD && t0 + TILE < end && next.live.any()) prefetch_tile(a, next, item.head, k_cache, v_cache, w);
      if (tile.live.any()) panel_tile(a, item, t0, scale, w);
    }
    for (int r = 0; r < rows; r++) leave(a, item, 0, r, w.sums[r], w.state[r], partials);
  }

  static void prefetch_tile(const Args& a, const Tile& tile, int head, const KV* k_cache, const KV* v_cache,
                            PanelScratch& w) {
    for (int t = 0; t < TILE; t++) {
      Base::template prefetch<D>(k_cache + tile.k[t / RUN] + t % RUN * a.k_slot_stride);
      if constexpr (!C::shared_kv)
        Base::template prefetch<DV>(v_cache + tile.v[t / RUN] + t % RUN * a.v_slot_stride);
    }
    if constexpr (FACTORS) Base::prefetch_factors(a, tile, head, w.factors);
  }

  // ---- what both ways share ------------------------------------------------------------------------------

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
  static void leave(const Args& a, const Item& item, int head, int row, const float* sums, State state,
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

  // (row, key) pairs that one thread does in the time it takes to wake another: about 2 us
  static constexpr int64_t SMALL_WORK = 1 << 19;

  // Runs the call. Returns 0, or the bytes of workspace it needs when it was given less (and did nothing).
  static int64_t run(const Args& a) {
    int heads = HEADS, chunk = PANEL_QUERIES;
    Counts n = Base::plan(a, heads, chunk, nullptr, nullptr);
    const int threads = std::clamp<int64_t>(n.work * (D + DV) / SMALL_WORK + 1, 1, std::max<int64_t>(a.num_threads, 1));
    const int64_t wanted = threads > 1 ? 4 * threads : 1; // items, so that threads finish together
    while (n.items < wanted && (heads > 1 || chunk * G > 32)) {
      if (heads == 1 && chunk == 1) break;
      heads = ceil_div(heads, 2);
      if (chunk * G > 32) chunk = ceil_div(chunk, 2);
      n = Base::plan(a, heads, chunk, nullptr, nullptr);
    }
    const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t scratch = padded(std::max(G <= STREAM_ROWS ? sizeof(StreamScratch) : 0, sizeof(PanelScratch)));
    const int64_t item_bytes = padded(n.items * sizeof(Item)), merge_bytes = padded(n.merges * sizeof(Merge));
    const int64_t partial_bytes = padded(n.partials * sizeof(float));
    const int64_t needed = item_bytes + merge_bytes + partial_bytes + threads * scratch + 64;
    if (a.workspace_bytes < needed) return needed;
    char* workspace = (char*)(((uintptr_t)a.workspace + 63) & ~(uintptr_t)63);
    Item* items = (Item*)workspace;
    Merge* merges = (Merge*)(workspace + item_bytes);
    float* partials = (float*)(workspace + item_bytes + merge_bytes);
    char* scratches = workspace + item_bytes + merge_bytes + partial_bytes;
    Base::plan(a, heads, chunk, items, merges);
#pragma omp parallel num_threads(threads)
    {
      char* own = scratches + omp_get_thread_num() * scratch;
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t i = 0; i < n.items; i++) {
        const Item& item = items[i];
        if (G <= STREAM_ROWS && item.stream) {
          if constexpr (G <= STREAM_ROWS) stream_item(a, item, partials, *(StreamScratch*)own);
        } else {
          panel_item(a, item, partials, *(PanelScratch*)own);
        }
        for (int h = 0; h < item.heads && item.partial >= 0; h++) {
          Merge& m = merges[item.merge + h];
          if (__atomic_sub_fetch(&m.left, 1, __ATOMIC_ACQ_REL) == 0) merge(a, m, partials);
        }
      }
    }
    return 0;
  }
};

} // namespace
} // namespace pagegen

extern "C" int64_t pagegen_attention(const pagegen_attention_args* args) {
  return pagegen::Attention<pagegen::Constants>::run(*args);
}
