// What a kernel is specialised to follows from its constants: types, widths, and the work items of a call.
#pragma once

#include "call.hpp"
#include "products.hpp"

namespace pagegen {
namespace {

enum class Dtype { float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int4 };
enum class Scales { none, head, token }; // what a cache's scales differ by

template <Dtype> struct Element;
template <> struct Element<Dtype::float32> { using type = float; };
template <> struct Element<Dtype::float16> { using type = fp16; };
template <> struct Element<Dtype::bfloat16> { using type = bf16; };
template <> struct Element<Dtype::float8_e4m3fn> { using type = e4m3; };
template <> struct Element<Dtype::float8_e5m2> { using type = e5m2; };
template <> struct Element<Dtype::int8> { using type = s8; };
template <> struct Element<Dtype::int4> { using type = s4x2; };

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
constexpr int ceil_div(int x, int by) { return (x + by - 1) / by; }
// x divided into the fewest equal parts of at most `most`
constexpr int even_part(int x, int most) { return ceil_div(x, ceil_div(x, most)); }

struct Keys {
  int32_t begin, end;
  PAGEGEN_INLINE bool none() const { return begin >= end; }
};

struct Item {
  int32_t sequence;
  int32_t token;     // row of q of its first query
  int32_t queries;
  int32_t position;  // of its first query; negative where a sequence has more queries than tokens
  int32_t own;       // position of the first of this step's own tokens
  int32_t head, heads;
  int32_t key_begin, key_end;
  int64_t partial;   // where its first head's partial rows go, in floats; -1: it finishes its rows itself
  int64_t partial_head; // from one head's to the next
  int64_t merge;        // of its first head, where it leaves partial rows; the other heads' follow
  bool stream;
  PAGEGEN_INLINE int64_t work(int group) const { return (int64_t)heads * queries * group * (key_end - key_begin); }
};

struct Merge { // the splits of one (sequence, KV head)
  int32_t token, queries, head, splits;
  int32_t left; // splits still to be computed: who computes the last one merges
  int64_t partial;
};

struct Counts {
  int64_t items = 0, merges = 0, partials = 0;
  int64_t work = 0, largest = 0; // (row, key) pairs: of all items, of the largest
  bool panels = false;           // whether some are not of the stream way
};

template <class C> struct Plan {
  using Q = typename Element<C::q_dtype>::type;
  using KV = typename Element<C::kv_dtype>::type;
  using M = Math<Q, KV, C::dot>;
  using Weight = typename M::Weight;
  using Args = pagegen_attention_args;

  static constexpr int G = C::group, D = C::head_dim, DV = C::v_head_dim, TILE = C::tile_kv;
  static_assert(TILE >= 16 && (TILE & (TILE - 1)) == 0 && TILE % C::streams == 0 && C::split_tokens % TILE == 0);
  static_assert(D % kPack<KV> == 0 && DV % kPack<KV> == 0 && (!C::shared_kv || DV <= D));

  // Factors that differ by token go to the scores and weights, those of a head to its scale and its result.
  static constexpr bool HEAD_SCALES = C::kv_scales == Scales::head, TOKEN_SCALES = C::kv_scales == Scales::token;
  static constexpr bool ZEROS = C::zero_points, FACTORS = TOKEN_SCALES || ZEROS;

  // key rows as words
  static constexpr int KEY_LANES = W * M::step;               // elements a vector of words holds
  static constexpr int KEY_FULL = D / KEY_LANES;              // whole vectors of a row
  static constexpr int KEY_TAIL = D % KEY_LANES;              // elements of the last, partial one
  static constexpr int KEY_WORDS = round_up(D, KEY_LANES) / M::step;
  // value rows as accumulator vectors
  static constexpr int VALUE_LANES = W * M::value_vectors;    // columns one load of V covers
  static constexpr int VALUE_FULL = DV / VALUE_LANES, VALUE_TAIL = DV % VALUE_LANES;
  static constexpr int OUT = round_up(DV, VALUE_LANES);       // width of an accumulator row
  static constexpr int VECTORS = OUT / W;
  static constexpr int STATE = OUT + W;                       // a partial row: its sums, then its state

  // A run is what can be addressed from one base: it lies in one block and in one stream.
  static constexpr int STREAM = TILE / C::streams;
  static constexpr int run_length() {
    int run = STREAM; // a power of two
    while (C::block_size % run) run /= 2;
    return run;
  }
  static constexpr int RUN = run_length(), RUNS = TILE / RUN;

  // The stream way takes R rows of a query at once: 8 at most, as registers go, and a divisor of the group.
  static constexpr int rows_at_once() {
    int parts = ceil_div(G, 8);
    while (G % parts) parts++;
    return G / parts;
  }
  static constexpr int R = rows_at_once();

  // Decided per sequence from its own number of queries. A group of 11 or 13 has no divisor of 4 to 8: panels serve it.
  static constexpr int STREAM_ROWS = G <= 8 ? 8 : G <= 32 && R >= 4 ? G : 0; // above it, packing panels pays for itself
  static constexpr int SPLIT_ROWS = 64;  // above it, an item has work enough without dividing its keys
  static constexpr int MR = kPanelRows;
  // Rows of a panel item: the more there are, the less often keys are packed (512 are 1.03 to 1.05 times as fast as
  // 256, 1024 another 1.02). Their queries and sums, which are read in order, stay in a 1 MiB L2.
  static constexpr int panel_rows() {
    const int row_bytes = 4 * (KEY_WORDS + OUT);
    // at least SPLIT_ROWS, however wide a head: an item whose keys are divided takes all rows of its sequence
    return std::max(G, std::clamp((768 << 10) / row_bytes, SPLIT_ROWS, 1024));
  }
  static constexpr int PANEL_QUERIES = panel_rows() / G;
  static constexpr int PANEL_ROWS = round_up(PANEL_QUERIES * G, MR);

  // keys that `head`'s query at `position` of sequence s attends, of `length`
  static PAGEGEN_INLINE Keys keys_of(const Args& a, int32_t s, int head, int32_t position, int32_t length) {
    int32_t begin = C::window ? std::max(0, position - C::window + 1) : 0;
    int32_t end = C::causal ? position + 1 : length;
    if constexpr (C::mask_range) {
      const Captured captured{a.captures};
      begin = std::clamp<int64_t>(Modifiers::low(captured, s, head, position), begin, std::max(begin, length));
      end = std::min<int64_t>(end, std::max<int64_t>(Modifiers::high(captured, s, head, position), begin));
    }
    return {begin, std::max(begin, end)};
  }

  // Calls visit(keys) for the rows of queries [position, position + count) and KV heads [head, head + heads), but once
  // where rows have the same keys.
  template <class Visit>
  static PAGEGEN_INLINE void each_row(const Args& a, int32_t s, int head, int heads, int32_t position, int32_t count,
                                      int32_t length, Visit visit) {
    const int step = C::mask_range_by_head ? 1 : heads * G;
    for (int32_t i = 0; i < count; i++)
      for (int h = head * G; h < (head + heads) * G; h += step) visit(keys_of(a, s, h, position + i, length));
  }

  // from the first to the last key that any row attends
  static Keys key_range(const Args& a, int32_t s, int32_t position, int32_t count, int32_t length) {
    if constexpr (!C::mask_range)
      return {keys_of(a, s, 0, position, length).begin, keys_of(a, s, 0, position + count - 1, length).end};
    Keys all{length, 0};
    each_row(a, s, 0, C::num_kv_heads, position, count, length, [&](Keys keys) {
      if (keys.none()) return;
      all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
    });
    return all.none() ? Keys{0, 0} : all;
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
        const bool split = rows <= SPLIT_ROWS || queries == 1;
        const int step = split ? queries : chunk; // later queries see more keys: they come first
        for (int32_t q0 = (queries - 1) / step * step; q0 >= 0; q0 -= step) {
          const int32_t count = std::min(step, queries - q0), position = length - queries + q0;
          const Keys keys = key_range(a, s, position, count, length);
          // parts of a fixed size, or so many equal parts
          const int32_t origin = C::num_splits ? keys.begin / TILE * TILE : 0;
          const int32_t part_keys = ceil_div(keys.end - origin, std::max(1, C::num_splits));
          const int32_t size = C::num_splits ? round_up(std::max(1, part_keys), TILE) : C::split_tokens;
          const int32_t first_split = split ? (keys.begin - origin) / size : 0;
          const int32_t splits = split ? std::max(1, ceil_div(keys.end - origin, size) - first_split) : 1;
          const int64_t partial_head = (int64_t)splits * count * G * STATE;
          n.work += (int64_t)C::num_kv_heads * count * G * (keys.end - keys.begin);
          for (int32_t i = 0; i < splits; i++) {
            Keys part = keys;
            if (splits > 1) {
              part.begin = std::max(keys.begin, origin + (first_split + i) * size);
              part.end = std::min<int64_t>(keys.end, origin + (int64_t)(first_split + i + 1) * size);
            }
            const int step_heads = stream ? std::min(heads, C::num_kv_heads) : 1;
            n.largest = std::max(n.largest, (int64_t)step_heads * count * G * (part.end - part.begin));
            n.panels |= !stream;
            for (int32_t h = 0; h < C::num_kv_heads; h += step_heads, n.items++) {
              if (!items) continue;
              const int64_t partial = n.partials + h * partial_head + (int64_t)i * count * G * STATE;
              items[n.items] = {s, first + q0, count, position, length - queries, h,
                                std::min(step_heads, C::num_kv_heads - h), part.begin, part.end,
                                splits > 1 ? partial : -1, partial_head, n.merges + h, stream};
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
};

} // namespace
} // namespace pagegen
