// Paged attention on CPUs: decode, prefill and ragged mixtures of both over a block table.
//
// Layouts, in elements; every last dimension has stride 1, all other strides are arguments:
//   q, out      [total_q, num_q_heads, head_dim or v_head_dim]
//   k, v cache  [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]
//   block_table int32 [num_seqs, max_blocks]; entries past ceil(seq_len / block_size) are never read
//   lse         float32 [total_q, num_q_heads], natural logarithm
//
// A work item is (sequence, run of queries, KV head or several, range of keys). The query heads that share a KV
// head are computed together, so K and V are read once a group. Two ways to compute an item:
//   stream  few rows (decode): rows of K and V are used straight from the cache, several token streams at a
//           time, while lines of a later tile are asked into L2. Bound by memory.
//   panel   many rows (prefill, large groups): a tile of K and V is packed once into panels that stay in L1/L2
//           and meets all rows of the item in register blocks. Bound by arithmetic.
// Softmax state, sums and partial results are float32. Which way serves a sequence, where its tiles and splits
// begin and the order in which splits are merged depend on that sequence alone: not on the number of threads,
// on its neighbours in the batch or on where its blocks lie. So results are bitwise reproducible.
//
// Build: c++ -O3 -march=native -std=c++20 -fopenmp -ffp-contract=off -shared -fPIC
// (contraction off: `x * scale - max` must not become a fused operation, or a score of 1e30 overflows)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <omp.h>

namespace pagegen {
namespace { // internal: two kernels in one process must not share a symbol, and templates' statics would be shared

enum class Dtype { float32, float16, bfloat16 };

// What is specialised. The generator rewrites these values by name; nothing else in this file changes.
struct Constants {
  static constexpr Dtype q_dtype = Dtype::bfloat16;
  static constexpr Dtype kv_dtype = Dtype::bfloat16;
  static constexpr int num_kv_heads = 8;
  static constexpr int group = 4; // query heads a KV head
  static constexpr int head_dim = 128;
  static constexpr int v_head_dim = 128;
  static constexpr int block_size = 16; // tokens a block
  static constexpr bool causal = true;
  static constexpr int window = 0;             // keys a query attends, itself included; 0: all
  static constexpr float logit_softcap = 0.0f; // 0: none
  static constexpr bool alibi = false;
  static constexpr bool sinks = false;
  static constexpr int tile_kv = 64;         // keys scored at once
  static constexpr int streams = 4;          // places of a tile read side by side (stream way)
  static constexpr int prefetch_tiles = 1;   // how far ahead lines are asked into L2; 0: never
  static constexpr int split_tokens = 2048;  // keys an item covers at most, where a sequence has few queries
  static constexpr int heads_together = 1;   // KV heads an item of the stream way takes at most
};

} // namespace
} // namespace pagegen

#include "vectors.hpp"

// One call. The host fills it; strides count elements. Returns are through `out` and `lse` (may be null).
struct pagegen_attention_args {
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  const int32_t* query_start_loc; // null: one query a sequence
  const float* alibi_slopes;      // [num_q_heads], or null
  const float* sinks;             // [num_q_heads], or null
  void* out;
  float* lse;
  void* workspace;
  int64_t workspace_bytes;
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride;
  int64_t k_block_stride, k_slot_stride, k_head_stride;
  int64_t v_block_stride, v_slot_stride, v_head_stride;
  int64_t table_stride;
  int64_t num_seqs;
  int64_t num_threads;
  double scale;
};

namespace pagegen {
namespace {

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
constexpr int ceil_div(int x, int by) { return (x + by - 1) / by; }
// x divided into the fewest equal parts of at most `most`
constexpr int even_part(int x, int most) { return ceil_div(x, ceil_div(x, most)); }

template <class C> struct Attention {
  template <Dtype D>
  using element = std::conditional_t<D == Dtype::float32, float, std::conditional_t<D == Dtype::float16, fp16, bf16>>;
  using Q = element<C::q_dtype>;
  using KV = element<C::kv_dtype>;
  using M = Math<Q, KV>;
  using Word = typename M::Word;
  using VWord = typename M::VWord;
  using Weight = typename M::Weight;
  using Args = pagegen_attention_args;

  static constexpr int G = C::group, D = C::head_dim, DV = C::v_head_dim, TILE = C::tile_kv;
  static_assert(TILE >= 16 && (TILE & (TILE - 1)) == 0 && TILE % C::streams == 0 && C::split_tokens % TILE == 0);

  // key rows as words
  static constexpr int KEY_LANES = W * M::step;               // elements a vector of words holds
  static constexpr int KEY_FULL = D / KEY_LANES;              // whole vectors of a row
  static constexpr int KEY_TAIL = D % KEY_LANES;              // elements of the last, partial one
  static constexpr int KEY_WORDS = round_up(D, KEY_LANES) / M::step;
  // value rows as accumulator vectors
  static constexpr int VALUE_LANES = W * M::value_vectors;    // columns one load of V covers
  static constexpr int VALUE_FULL = DV / VALUE_LANES, VALUE_TAIL = DV % VALUE_LANES;
  static constexpr int OUT = round_up(DV, VALUE_LANES);       // width of an accumulator row
  static constexpr int STATE = OUT + W;                       // a partial row: its sums, then max and total

  // A run is what can be addressed from one base: it lies in one block and in one stream.
  static constexpr int STREAM = TILE / C::streams;
  static constexpr int run_length() {
    int run = STREAM; // a power of two
    while (C::block_size % run) run /= 2;
    return run;
  }
  static constexpr int RUN = run_length(), RUNS = TILE / RUN;

  // Decided per sequence from its own length alone.
  static constexpr int STREAM_ROWS = 8;  // above it, packing panels pays for itself
  static constexpr int SPLIT_ROWS = 64;  // above it, an item has work enough without dividing its keys
  static constexpr int MR = kPanelRows;
  static constexpr int panel_rows() {    // rows of a panel item: its queries and sums stay in half of a 1 MiB L2
    const int row_bytes = 4 * (KEY_WORDS + OUT);
    // at least SPLIT_ROWS, however wide a head: an item whose keys are divided takes all rows of its sequence
    return std::max(G, std::clamp((512 << 10) / row_bytes, SPLIT_ROWS, 256));
  }
  static constexpr int PANEL_QUERIES = panel_rows() / G;
  static constexpr int PANEL_ROWS = round_up(PANEL_QUERIES * G, MR);

  static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
  static constexpr float INF = __builtin_inff();

  // ---- the plan: which items there are -------------------------------------------------------------------

  struct Item {
    int32_t sequence;
    int32_t token;     // row of q of its first query
    int32_t queries;
    int32_t position;  // of its first query; negative where a sequence has more queries than tokens
    int32_t head, heads;
    int32_t key_begin, key_end;
    int64_t partial;   // where its first head's partial rows go, in floats; -1: it finishes its rows itself
    int64_t partial_head; // from one head's to the next
    int64_t merge;        // of its first head, where it leaves partial rows; the other heads' follow
    bool stream;
  };
  struct Merge { // the splits of one (sequence, KV head)
    int32_t token, queries, head, splits;
    int32_t left; // splits still to be computed: who computes the last one merges
    int64_t partial;
  };
  struct Counts {
    int64_t items = 0, merges = 0, partials = 0;
    int64_t work = 0; // (row, key) pairs
  };

  struct Keys {
    int32_t begin, end;
  };
  // keys that the query at `position` attends, of `length`
  static PAGEGEN_INLINE Keys keys_of(int32_t position, int32_t length) {
    const int32_t begin = C::window ? std::max(0, position - C::window + 1) : 0;
    const int32_t end = C::causal ? position + 1 : length;
    return {begin, std::max(begin, end)};
  }

  // Writes the items and merges (or only counts them, when `items` is null). `heads` and `chunk` bound the KV
  // heads and the queries an item takes; they change no result.
  static Counts plan(const Args& a, int heads, int chunk, Item* items, Merge* merges) {
    Counts n;
    for (int pass = 0; pass < 2; pass++) { // long items first, so that the last ones to finish are short
      for (int32_t s = 0; s < a.num_seqs; s++) {
        const int32_t first = a.query_start_loc ? a.query_start_loc[s] : s;
        const int32_t queries = a.query_start_loc ? a.query_start_loc[s + 1] - first : 1;
        const int32_t length = a.seq_lens[s];
        const int64_t rows = (int64_t)queries * G;
        const bool stream = rows <= STREAM_ROWS;
        if (queries <= 0 || stream != (pass == 1)) continue;
        const bool split = rows <= SPLIT_ROWS;
        const int step = split ? queries : chunk; // later queries see more keys: they come first
        for (int32_t q0 = (queries - 1) / step * step; q0 >= 0; q0 -= step) {
          const int32_t count = std::min(step, queries - q0), position = length - queries + q0;
          const Keys keys{keys_of(position, length).begin, keys_of(position + count - 1, length).end};
          const int32_t first_split = split ? keys.begin / C::split_tokens : 0;
          const int32_t splits =
              split ? std::max(1, ceil_div(keys.end, C::split_tokens) - first_split) : 1;
          const int64_t partial_head = (int64_t)splits * count * G * STATE;
          n.work += (int64_t)C::num_kv_heads * count * G * (keys.end - keys.begin);
          for (int32_t i = 0; i < splits; i++) {
            Keys part = keys;
            if (splits > 1) {
              part.begin = std::max(keys.begin, (first_split + i) * C::split_tokens);
              part.end = std::min<int64_t>(keys.end, (int64_t)(first_split + i + 1) * C::split_tokens);
            }
            const int step_heads = stream ? heads : 1;
            for (int32_t h = 0; h < C::num_kv_heads; h += step_heads, n.items++) {
              if (!items) continue;
              const int64_t partial = n.partials + h * partial_head + (int64_t)i * count * G * STATE;
              items[n.items] = {s, first + q0, count, position, h, std::min(step_heads, C::num_kv_heads - h),
                                part.begin, part.end, splits > 1 ? partial : -1, partial_head, n.merges + h, stream};
            }
          }
          if (splits == 1) continue;
          for (int32_t h = 0; h < C::num_kv_heads; h++, n.merges++)
            if (merges) merges[n.merges] = {first + q0, count, h, splits, splits, n.partials + h * partial_head};
          n.partials += C::num_kv_heads * partial_head;
        }
      }
    }
    return n;
  }

  // ---- where tokens lie ----------------------------------------------------------------------------------

  struct Tile {
    int64_t k[RUNS], v[RUNS]; // of each run's first token, head 0
  };

  // Runs without a key in [begin, end) get the place of one that has: their table entries may hold anything.
  static PAGEGEN_INLINE void locate(const Args& a, const int32_t* table, int32_t t0, Keys keys, Tile& tile) {
    for (int i = 0; i < RUNS; i++) {
      int32_t token = t0 + i * RUN;
      if (token + RUN <= keys.begin || token >= keys.end) token = std::clamp(token, keys.begin, keys.end - 1);
      const uint32_t block = (uint32_t)token / C::block_size, slot = (uint32_t)token % C::block_size;
      tile.k[i] = table[block] * a.k_block_stride + slot * a.k_slot_stride;
      tile.v[i] = table[block] * a.v_block_stride + slot * a.v_slot_stride;
    }
  }

  // The rows of one tile and head, in the order the stream way takes them: lane t is token
  // (t % streams) * STREAM + t / streams.
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

  // Copies the valid rows of a partial tile and zeroes the others: what lies in unused slots (NaN, perhaps) is
  // never multiplied, not even by 0.
  template <int WIDTH> static Rows stage(const Rows& from, int32_t t0, Keys keys, KV* buffer) {
    Rows rows;
    for (int t = 0; t < TILE; t++) {
      KV* to = buffer + t * WIDTH;
      const bool valid = t0 + t >= keys.begin && t0 + t < keys.end;
      if (valid) std::memcpy(to, from.base[t / RUN] + t % RUN * from.stride, WIDTH * sizeof(KV));
      else std::memset((void*)to, 0, WIDTH * sizeof(KV));
    }
    for (int i = 0; i < RUNS; i++) rows.base[i] = buffer + i * RUN * WIDTH;
    rows.stride = WIDTH;
    return rows;
  }

  template <int WIDTH> static PAGEGEN_INLINE void prefetch(const KV* row) {
#pragma GCC unroll 8
    for (int b = 0; b < (int)(WIDTH * sizeof(KV)); b += 64) __builtin_prefetch((const char*)row + b, 0, 2); // 2: L2
  }

  // ---- softmax over one row of a tile --------------------------------------------------------------------

  struct State { // of one row, in units of log2
    float max = -INF, total = 0.0f;
  };
  struct RowKeys {
    int32_t begin, end; // tokens of the tile that the row attends
    float slope;        // ALiBi, times log2(e)
    int32_t distance;   // position of the tile's first token less the query's
  };

  // Turns raw scores (lane i is token lanes[i] of the tile) into weights 2^(score - max) and returns what the
  // row's older sums are to be multiplied by. At least one token must be attended.
  template <bool MASKED>
  static PAGEGEN_INLINE float softmax(float* score, Weight* weight, const int32_t* lanes, RowKeys keys, float scale,
                                      State& state) {
    vf top = splat(-INF);
    for (int i = 0; i < TILE; i += W) {
      vf x = load(score + i);
      if constexpr (C::logit_softcap != 0.0f) {
        x = tanh(x * (scale / C::logit_softcap)) * (C::logit_softcap * LOG2E);
      } else {
        x = x * (scale * LOG2E);
      }
      if constexpr (C::alibi) {
        x = x + __builtin_convertvector(load(lanes + i) + keys.distance, vf) * keys.slope;
      }
      if constexpr (MASKED) {
        const vi token = load(lanes + i);
        x = select((token >= keys.begin) & (token < keys.end), x, splat(-INF));
      }
      store(score + i, x);
      top = larger(top, x);
    }
    const float max = std::max(state.max, max_lanes(top));
    const float decay = max == state.max ? 1.0f : exp2(state.max - max);
    vf sum = vf{};
    for (int i = 0; i < TILE; i += W) {
      const vf x = load(score + i);
      vf w = exp2(x - max);
      if constexpr (MASKED) w = select(x == -INF, vf{}, w);
      sum = sum + w;
      store_float(weight + i, w);
    }
    state.total = state.total * decay + sum_lanes(sum);
    state.max = max;
    return decay;
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
    alignas(64) KV k[TILE * D];
    alignas(64) KV v[TILE * DV];
    State state[HEADS][STREAM_ROWS];
    Tile tiles[SLOTS];
  };

  struct Lanes {
    alignas(64) int32_t token[TILE];
    constexpr Lanes(bool streamed) : token{} {
      for (int i = 0; i < TILE; i++) token[i] = streamed ? i % C::streams * STREAM + i / C::streams : i;
    }
  };
  static constexpr Lanes kStreamed{true}, kPlain{false};

  static void stream_scores(const Rows& k, const Rows& next, const Word (*q)[KEY_WORDS], float (*score)[TILE]) {
    for (int t = 0; t < TILE; t += TOKENS) {
      const KV* row[TOKENS];
      vf sum[GP * TOKENS] = {};
#pragma GCC unroll 16
      for (int j = 0; j < TOKENS; j++) {
        row[j] = k.row(t + j);
        if constexpr (AHEAD) prefetch<D>(next.row(t + j));
      }
      const auto add = [&](auto loader, int vector) __attribute__((always_inline)) {
        VWord key[TOKENS];
#pragma GCC unroll 16
        for (int j = 0; j < TOKENS; j++) key[j] = loader(row[j] + vector * KEY_LANES);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
          const VWord query = M::load_words(q[g] + vector * W);
#pragma GCC unroll 16
          for (int j = 0; j < TOKENS; j++) sum[g * TOKENS + j] = M::dot(sum[g * TOKENS + j], key[j], query);
        }
      };
#pragma GCC unroll 4
      for (int i = 0; i < KEY_FULL; i++) add([](const KV* p) { return M::template load_row<KEY_LANES>(p); }, i);
      if constexpr (KEY_TAIL > 0) add([](const KV* p) { return M::template load_row<KEY_TAIL>(p); }, KEY_FULL);
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
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = load(&sums[r0 + r][c0 + c * W]) * decay[r0 + r];
    for (int t = 0; t < TILE; t += M::step) {
      const KV* row[M::step];
#pragma GCC unroll 2
      for (int j = 0; j < M::step; j++) {
        row[j] = v.row(t + j);
        if constexpr (FIRST && AHEAD) prefetch<DV>(next.row(t + j));
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
        if (VALUE_TAIL == 0 || column + VALUE_LANES <= DV) M::template load_values<VALUE_LANES>(row, column, value);
        else if constexpr (VALUE_TAIL > 0) M::template load_values<VALUE_TAIL>(row, column, value);
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int i = 0; i < M::value_vectors; i++) sum[r][c + i] = M::dot(sum[r][c + i], value[i], p[r]);
      }
    }
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 24
      for (int c = 0; c < COLUMNS; c++) store(&sums[r0 + r][c0 + c * W], sum[r][c]);
  }

  // Whole value rows at a time where the registers allow: half a row a time costs a third of the bandwidth.
  static constexpr int VECTORS = OUT / W;
  static constexpr int COLUMN_PART =
      round_up(even_part(VECTORS, std::max(M::value_vectors, kAccumulators / std::min(G, 2))), M::value_vectors);
  static constexpr int COLUMN_REST = VECTORS % COLUMN_PART;
  static constexpr int ROW_PART = G > 8 ? 1 : even_part(G, std::max(1, kAccumulators / COLUMN_PART));
  static constexpr int ROW_REST = G % ROW_PART;

  template <int COLUMNS, bool FIRST>
  static void stream_column(const Rows& v, const Rows& next, int c0, const Weight (*weight)[TILE], const float* decay,
                            float (*sums)[OUT]) {
    stream_block<ROW_PART, COLUMNS, FIRST>(v, next, 0, c0, weight, decay, sums);
    for (int r = ROW_PART; r + ROW_PART <= G; r += ROW_PART)
      stream_block<ROW_PART, COLUMNS, false>(v, next, r, c0, weight, decay, sums);
    if constexpr (ROW_REST > 0)
      stream_block<ROW_REST, COLUMNS, false>(v, next, G - ROW_REST, c0, weight, decay, sums);
  }

  static void stream_values(const Rows& v, const Rows& next, const Weight (*weight)[TILE], const float* decay,
                            float (*sums)[OUT]) {
    stream_column<COLUMN_PART, true>(v, next, 0, weight, decay, sums);
    for (int c = COLUMN_PART; c + COLUMN_PART <= VECTORS; c += COLUMN_PART)
      stream_column<COLUMN_PART, false>(v, next, c * W, weight, decay, sums);
    if constexpr (COLUMN_REST > 0)
      stream_column<COLUMN_REST, false>(v, next, (VECTORS - COLUMN_REST) * W, weight, decay, sums);
  }

  // One tile and one KV head: every query of the item meets it.
  static void stream_tile(const Args& a, const Item& item, int head, int32_t t0, const Rows& k, const Rows& v,
                          const Rows& next_k, const Rows& next_v, StreamScratch& w) {
    const int32_t length = a.seq_lens[item.sequence];
    for (int i = 0; i < item.queries; i++) {
      const int r0 = i * G;
      const int32_t position = item.position + i;
      const Keys keys = keys_of(position, length);
      const int32_t begin = std::max(keys.begin, item.key_begin) - t0, end = std::min(keys.end, item.key_end) - t0;
      if (std::max(begin, 0) >= std::min(end, TILE)) continue;
      stream_scores(k, next_k, w.q[head] + r0, w.score);
      float decay[STREAM_ROWS];
      for (int g = 0; g < G; g++) {
        RowKeys row{begin, end, 0.0f, t0 - position};
        if constexpr (C::alibi) row.slope = a.alibi_slopes[(item.head + head) * G + g] * LOG2E;
        State& state = w.state[head][r0 + g];
        decay[g] = begin <= 0 && end >= TILE
                       ? softmax<false>(w.score[g], w.weight[g], kStreamed.token, row, a.scale, state)
                       : softmax<true>(w.score[g], w.weight[g], kStreamed.token, row, a.scale, state);
      }
      stream_values(v, next_v, w.weight, decay, w.sums[head] + r0);
    }
  }

  static void stream_item(const Args& a, const Item& item, float* partials, StreamScratch& w) {
    const Keys keys{item.key_begin, item.key_end};
    const int32_t* table = a.block_table + item.sequence * a.table_stride;
    const int rows = item.queries * G;
    for (int h = 0; h < item.heads; h++) {
      for (int r = 0; r < rows; r++) load_query(a, item.token + r / G, (item.head + h) * G + r % G, w.q[h][r]);
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
      for (; located <= next_tile; located++) locate(a, table, located * TILE, keys, w.tiles[located % SLOTS]);
      const Tile &here = w.tiles[tile % SLOTS], &there = w.tiles[next_tile % SLOTS];
      const int32_t t0 = tile * TILE;
      Rows k = rows_at(k_cache + h * a.k_head_stride, here.k, a.k_slot_stride);
      Rows v = rows_at(v_cache + h * a.v_head_stride, here.v, a.v_slot_stride);
      const Rows next_k = rows_at(k_cache + next_h * a.k_head_stride, there.k, a.k_slot_stride);
      const Rows next_v = rows_at(v_cache + next_h * a.v_head_stride, there.v, a.v_slot_stride);
      if (t0 < keys.begin || t0 + TILE > keys.end) {
        k = stage<D>(k, t0, keys, w.k);
        v = stage<DV>(v, t0, keys, w.v);
      }
      stream_tile(a, item, h, t0, k, v, next_k, next_v, w);
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
    State state[PANEL_ROWS];
  };

  static void pack(const Args& a, const Tile& tile, const KV* k_cache, const KV* v_cache, int32_t t0, Keys keys,
                   PanelScratch& w) {
    static constexpr KV nothing[std::max(D, DV)] = {};
    const auto row = [&](const KV* cache, const int64_t* runs, int64_t stride, int t) __attribute__((always_inline)) {
      const bool valid = t0 + t >= keys.begin && t0 + t < keys.end; // NaN in an unused slot must not be read
      return valid ? cache + runs[t / RUN] + t % RUN * stride : nothing;
    };
    for (int t = 0; t < TILE; t += W) {
      const KV* rows[W];
      for (int j = 0; j < W; j++) rows[j] = row(k_cache, tile.k, a.k_slot_stride, t + j);
      const auto turn = [&](auto loader, int vector) __attribute__((always_inline)) {
        vi words[W];
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) words[j] = M::bits(loader(rows[j] + vector * KEY_LANES));
        transpose(words, (int32_t*)&w.k[vector * W][t], TILE);
      };
      for (int i = 0; i < KEY_FULL; i++) turn([](const KV* p) { return M::template load_row<KEY_LANES>(p); }, i);
      if constexpr (KEY_TAIL > 0) turn([](const KV* p) { return M::template load_row<KEY_TAIL>(p); }, KEY_FULL);
    }
    for (int t = 0; t < TILE; t += M::step) {
      const KV* rows[M::step];
      for (int j = 0; j < M::step; j++) rows[j] = row(v_cache, tile.v, a.v_slot_stride, t + j);
      VWord words[M::value_vectors];
      Word* to = w.v[t / M::step];
      for (int c = 0; c < VALUE_FULL * VALUE_LANES; c += VALUE_LANES) {
        M::template load_values<VALUE_LANES>(rows, c, words);
        for (int i = 0; i < M::value_vectors; i++) M::store_words(to + c + i * W, words[i]);
      }
      if constexpr (VALUE_TAIL > 0) {
        M::template load_values<VALUE_TAIL>(rows, VALUE_FULL * VALUE_LANES, words);
        for (int i = 0; i < M::value_vectors; i++) M::store_words(to + VALUE_FULL * VALUE_LANES + i * W, words[i]);
      }
    }
  }

  // c[MR][VECTORS * W] = c * decay (or 0) + a[MR][STEPS] b[STEPS][...], all in registers
  template <int VECTORS_, int STEPS, int A_STRIDE, int B_STRIDE, int C_STRIDE, bool FRESH>
  static PAGEGEN_INLINE void multiply(const Word* a, const Word* b, float* c, const float* decay) {
    vf sum[MR][VECTORS_];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS_; j++) sum[r][j] = FRESH ? vf{} : load(c + r * C_STRIDE + j * W) * decay[r];
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
      for (int j = 0; j < VECTORS_; j++) store(c + r * C_STRIDE + j * W, sum[r][j]);
  }

  static void panel_scores(const Word* q, PanelScratch& w) {
    constexpr int PART = std::min(kPanelVectors, TILE / W);
    for (int t = 0; t < TILE; t += PART * W)
      multiply<PART, ceil_div(D, M::step), KEY_WORDS, TILE, TILE, true>(q, &w.k[0][t], &w.score[0][t], nullptr);
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

  static void panel_tile(const Args& a, const Item& item, int32_t t0, PanelScratch& w) {
    const int32_t length = a.seq_lens[item.sequence];
    const int rows = item.queries * G;
    for (int r0 = 0; r0 < rows; r0 += MR) {
      const int count = std::min(MR, rows - r0);
      RowKeys row[MR];
      bool any = false;
      for (int r = 0; r < count; r++) {
        const int32_t position = item.position + (r0 + r) / G;
        const Keys keys = keys_of(position, length);
        const int32_t begin = std::max(keys.begin, item.key_begin) - t0, end = std::min(keys.end, item.key_end) - t0;
        row[r] = {begin, end, 0.0f, t0 - position};
        if constexpr (C::alibi) row[r].slope = a.alibi_slopes[item.head * G + (r0 + r) % G] * LOG2E;
        any |= std::max(begin, 0) < std::min(end, TILE);
      }
      if (!any) continue;
      panel_scores(w.q[r0], w);
      float decay[MR];
      for (int r = 0; r < MR; r++) {
        if (r >= count || std::max(row[r].begin, 0) >= std::min(row[r].end, TILE)) {
          decay[r] = 1.0f;
          std::memset((void*)w.weight[r], 0, sizeof w.weight[r]);
        } else if (row[r].begin <= 0 && row[r].end >= TILE) {
          decay[r] = softmax<false>(w.score[r], w.weight[r], kPlain.token, row[r], a.scale, w.state[r0 + r]);
        } else {
          decay[r] = softmax<true>(w.score[r], w.weight[r], kPlain.token, row[r], a.scale, w.state[r0 + r]);
        }
      }
      panel_values(w.sums[r0], decay, w);
    }
  }

  static void panel_item(const Args& a, const Item& item, float* partials, PanelScratch& w) {
    const Keys keys{item.key_begin, item.key_end};
    const int32_t* table = a.block_table + item.sequence * a.table_stride;
    const int rows = item.queries * G, padded = round_up(rows, MR);
    for (int r = 0; r < rows; r++) load_query(a, item.token + r / G, item.head * G + r % G, w.q[r]);
    std::memset((void*)w.q[rows], 0, sizeof(w.q[0]) * (padded - rows));
    std::memset(w.sums, 0, sizeof(w.sums[0]) * padded);
    std::fill(w.state, w.state + rows, State{});
    const KV* k_cache = (const KV*)a.k_cache + item.head * a.k_head_stride;
    const KV* v_cache = (const KV*)a.v_cache + item.head * a.v_head_stride;
    for (int32_t t0 = keys.begin / TILE * TILE; t0 < keys.end; t0 += TILE) {
      Tile tile;
      locate(a, table, t0, keys, tile);
      pack(a, tile, k_cache, v_cache, t0, keys, w);
      if (AHEAD && t0 + TILE < keys.end) {
        locate(a, table, t0 + TILE, keys, tile);
        for (int t = 0; t < TILE; t++) {
          prefetch<D>(k_cache + tile.k[t / RUN] + t % RUN * a.k_slot_stride);
          prefetch<DV>(v_cache + tile.v[t / RUN] + t % RUN * a.v_slot_stride);
        }
      }
      panel_tile(a, item, t0, w);
    }
    for (int r = 0; r < rows; r++) leave(a, item, 0, r, w.sums[r], w.state[r], partials);
  }

  // ---- what both ways share ------------------------------------------------------------------------------

  static void load_query(const Args& a, int64_t token, int head, Word* to) {
    const Q* from = (const Q*)a.q + token * a.q_token_stride + head * a.q_head_stride;
    for (int i = 0; i < KEY_FULL; i++)
      M::store_words(to + i * W, M::template load_row<KEY_LANES>(from + i * KEY_LANES));
    if constexpr (KEY_TAIL > 0)
      M::store_words(to + KEY_FULL * W, M::template load_row<KEY_TAIL>(from + KEY_FULL * KEY_LANES));
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
  }

  // Divides by the total, the head's sink included (here and nowhere else), and writes the row.
  static void finish(const Args& a, int64_t token, int head, const float* sums, State state) {
    float factor = state.total > 0.0f || state.total != state.total ? 1.0f / state.total : 0.0f;
    float lse = state.total > 0.0f || state.total != state.total ? state.max * LN2 + std::log(state.total) : -INF;
    if constexpr (C::sinks) {
      const float sink = a.sinks[head] * LOG2E;
      if (factor == 0.0f) {
        lse = a.sinks[head];
      } else {
        const float max = std::max(state.max, sink);
        const float old = exp2(state.max - max), total = state.total * old + exp2(sink - max);
        factor = old / total;
        lse = max * LN2 + std::log(total);
      }
    }
    if (a.lse) a.lse[token * a.lse_token_stride + head] = lse;
    alignas(64) Q row[OUT];
    for (int c = 0; c < OUT; c += VALUE_LANES) {
      vf x[M::value_vectors];
      for (int i = 0; i < M::value_vectors; i++) x[i] = load(sums + c + i * W);
      M::natural_order(x);
      for (int i = 0; i < M::value_vectors; i++) store_float(row + c + i * W, factor == 0.0f ? vf{} : x[i] * factor);
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
    Counts n = plan(a, heads, chunk, nullptr, nullptr);
    const int threads = std::clamp<int64_t>(n.work * (D + DV) / SMALL_WORK + 1, 1, std::max<int64_t>(a.num_threads, 1));
    const int64_t wanted = threads > 1 ? 4 * threads : 1; // items, so that threads finish together
    while (n.items < wanted && (heads > 1 || chunk * G > 32)) {
      if (heads == 1 && chunk == 1) break;
      heads = ceil_div(heads, 2);
      if (chunk * G > 32) chunk = ceil_div(chunk, 2);
      n = plan(a, heads, chunk, nullptr, nullptr);
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
    plan(a, heads, chunk, items, merges);
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
