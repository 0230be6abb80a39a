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
//           time, while lines of a later tile are prefetched. Bound by memory.
//   panel   many rows (prefill, large groups): a tile of K and V is packed once into panels that stay in L1/L2
//           and meets all rows of the item in register blocks. Bound by arithmetic.
// A score is scaled, capped, gets its ALiBi and then the score function's change; causality, window, tree and mask
// function decide which are kept. Keys that no row of an item may attend are not read, values neither: 0 * NaN would
// be NaN. A value that is not finite reaches the rows of its item that attend its key, and may reach the others.
// Softmax state, sums and partial results are float32 (sums of bytes are exact integers, made float32 once a tile).
// Which way serves a sequence, where its tiles and splits begin and the order in which splits are merged depend on that
// sequence alone: not on the number of threads, on its neighbours in the batch or on where its blocks lie. So results
// are bitwise reproducible.
//
// The parts: vectors.hpp, narrow.hpp (quantised elements), products.hpp, call.hpp (arguments, score and mask
// functions), plan.hpp (work items), tiles.hpp (where tokens lie), softmax.hpp, ends.hpp (where rows begin and end),
// rows.hpp (a tile's rows, and asking for them ahead), words.hpp, bytes.hpp and planes.hpp (products of the stream
// way), stream.hpp, panel.hpp.
//
// Build: c++ -O2 -fpeel-loops -std=c++20 -fopenmp -ffp-contract=off -fwrapv -shared -fPIC -march=native
// (contraction off: `x * scale - max` must not become a fused operation, or a score of 1e30 overflows)
#pragma once

#include "panel.hpp"
#include "stream.hpp"

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
  static constexpr int rows_together = 2;    // rows of q that a row of V of 16 or 32 bits meets at once
  static constexpr int prefetch_ahead = 1; // how far ahead lines are prefetched (stream way); 0: never
  static constexpr bool read_tokens = false; // a few tokens of all heads in turn, not a tile of a head (stream way)
  static constexpr int prefetch_hint = 2;    // into which cache: 3 L1, 2 L2
  static constexpr bool dot = true;          // products of narrower types where the CPU has them; false: of float32
  static constexpr int split_tokens = 2048;  // keys an item covers at most, where a sequence has few queries
  static constexpr int num_splits = 0;       // instead, where not 0: so many items a sequence, of equal length
  static constexpr bool balanced = false;    // a thread takes a run of items of equal work; false: the next one left
  static constexpr int heads_together = 1;   // KV heads an item of the stream way takes at most
};

template <class C> struct Attention : Ends<C> {
  using Base = Ends<C>;
  using StreamScratch = typename Stream<C>::Scratch;
  using PanelScratch = typename Panel<C>::Scratch;
  using typename Base::Args;
  using Base::D, Base::DV, Base::G, Base::PANEL_QUERIES, Base::STREAM_ROWS;

  // multiply-adds that one thread does in the time it takes to wake another: about 2 us
  static constexpr int64_t SMALL_WORK = 1 << 19;

  struct Division {
    Counts counts;
    int threads, heads, chunk; // KV heads and queries an item takes, at most
  };
  // Items small enough for threads to finish together, where each takes the next one when it is done.
  static Division divide(const Args& a) {
    Division d{{}, 1, C::heads_together, PANEL_QUERIES};
    Counts& n = d.counts;
    n = Base::plan(a, d.heads, d.chunk, nullptr, nullptr);
    d.threads = std::clamp<int64_t>(n.work * (D + DV) / SMALL_WORK + 1, 1, std::max<int64_t>(a.num_threads, 1));
    const auto enough = [&] {
      if (n.largest * 4 * d.threads <= n.work) return true; // a thread ends less than a quarter of its share late
      // Reading by tokens, fewer heads are read at 0.6 to 0.9 of the speed, since the CPU reads ahead of each token's
      // rows, which are other heads': a half will do, 3 items for 2 threads.
      const int64_t share = n.work / d.threads, rounds = (n.items + d.threads - 1) / d.threads;
      const int64_t most = std::min(share + n.largest, n.largest * rounds); // for one thread
      return Stream<C>::BY_TOKENS && !n.panels && most <= share + share / 2;
    };
    while (d.threads > 1 && !enough()) {
      const bool shorter = d.chunk > 1 && d.chunk * G > 32;
      if (d.heads == 1 && !shorter) break;
      d.heads = ceil_div(d.heads, 2);
      if (shorter) d.chunk = ceil_div(d.chunk, 2);
      n = Base::plan(a, d.heads, d.chunk, nullptr, nullptr);
    }
    return d;
  }

  // Runs the call. Returns 0, or the bytes of workspace it needs when it was given less (and did nothing).
  static int64_t run(const Args& a) {
    const Division d = divide(a);
    const Counts& n = d.counts;
    const int threads = d.threads;
    const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t scratch = padded(std::max(sizeof(StreamScratch), sizeof(PanelScratch)));
    const int64_t item_bytes = padded(n.items * sizeof(Item)), merge_bytes = padded(n.merges * sizeof(Merge));
    const int64_t partial_bytes = padded(n.partials * sizeof(float));
    const int64_t needed = item_bytes + merge_bytes + partial_bytes + threads * scratch + 64;
    if (a.workspace_bytes < needed) return needed;
    char* workspace = (char*)(((uintptr_t)a.workspace + 63) & ~(uintptr_t)63);
    Item* items = (Item*)workspace;
    Merge* merges = (Merge*)(workspace + item_bytes);
    float* partials = (float*)(workspace + item_bytes + merge_bytes);
    char* scratches = workspace + item_bytes + merge_bytes + partial_bytes;
    Base::plan(a, d.heads, d.chunk, items, merges);
    const auto compute = [&](const Item& item, char* own) {
      if (STREAM_ROWS > 0 && item.stream) {
        if constexpr (STREAM_ROWS > 0) Stream<C>::run(a, item, partials, *(StreamScratch*)own);
      } else {
        Panel<C>::run(a, item, partials, *(PanelScratch*)own);
      }
      for (int h = 0; h < item.heads && item.partial >= 0; h++) {
        Merge& m = merges[item.merge + h];
        if (__atomic_sub_fetch(&m.left, 1, __ATOMIC_ACQ_REL) == 0) Base::merge(a, m, partials);
      }
    };
#pragma omp parallel num_threads(threads)
    {
      const int64_t thread = omp_get_thread_num();
      char* own = scratches + thread * scratch;
      if constexpr (C::balanced) {
        int64_t before = 0; // (row, key) pairs; an item belongs to the thread that its middle falls to
        for (int64_t i = 0; i < n.items; i++) {
          const int64_t work = items[i].work(G);
          if ((before + work / 2) * omp_get_num_threads() / (n.work + 1) == thread) compute(items[i], own);
          before += work;
        }
      } else {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < n.items; i++) compute(items[i], own);
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
