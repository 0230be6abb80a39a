// What a CPU's memory and arithmetic can give: sequential reading, reading the blocks of a paged cache in the order a
// decode kernel takes them, and multiply-adds that wait for nothing. Limits to hold kernels against; no kernel is here.
//
// Sums are of 32-bit words modulo 2^32: they keep compilers from leaving a read out, and a test can tell what was read.
//
// Build: c++ -O2 -fpeel-loops -std=c++20 -fopenmp -ffp-contract=off -fwrapv -shared -fPIC -march=native
#pragma once

#include "vectors.hpp"

#include <algorithm>
#include <omp.h>
#include <vector>

// One of K and V: bytes from one block, token and head to the next, and bytes of one token's row of one head.
struct pagegen_walk_rows {
  const char* cache; // null: this one is not read
  int64_t block, slot, head, row_bytes; // row_bytes: a multiple of 4
};

struct pagegen_walk_args {
  pagegen_walk_rows k, v;
  const int32_t* block_table; // [num_seqs, table_stride]
  const int32_t* seq_lens;    // [num_seqs]
  int64_t table_stride, num_seqs, num_heads, block_size;
  int64_t tile;        // tokens of one head read before another head or V has its turn
  int64_t streams;     // places of a tile read side by side; divides it
  int64_t ahead;       // (tile, head) units asked into L2 before their turn; 0: none; 8 at most
  int64_t heads;       // heads that an item reads in turn
  int64_t split;       // tokens an item covers; a multiple of tile
  int64_t num_threads;
};

namespace pagegen {
namespace {

typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint32_t vu_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t word_any __attribute__((aligned(4), may_alias));

constexpr int64_t kVector = 4 * W, kLine = 64;
constexpr int kSums = 8; // independent additions: one load a cycle or two need as many

PAGEGEN_INLINE uint32_t sum_words(const vu* sums) {
  uint32_t total = 0;
  for (int i = 0; i < kSums; i++)
    for (int j = 0; j < W; j++) total += sums[i][j];
  return total;
}

// `bytes`: a multiple of 4
PAGEGEN_INLINE uint32_t read_run(const char* p, int64_t bytes, vu* sums) {
  int64_t at = 0;
  for (; at + kSums * kVector <= bytes; at += kSums * kVector)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; i++) sums[i] += *(const vu_any*)(p + at + i * kVector);
  for (int i = 0; at + kVector <= bytes; at += kVector, i++) sums[i] += *(const vu_any*)(p + at);
  uint32_t rest = 0;
  for (; at < bytes; at += 4) rest += *(const word_any*)(p + at);
  return rest;
}

// A row of 256 bytes (head dim 128 in 16 bits) knows its length; others look.
PAGEGEN_INLINE uint32_t read_row(const char* p, int64_t bytes, vu* sums) {
  if (bytes != 256) return read_run(p, bytes, sums);
#pragma GCC unroll 16
  for (int i = 0; i < 256 / kVector; i++) sums[i % kSums] += *(const vu_any*)(p + i * kVector);
  return 0;
}

// Where the tokens of a tile lie: a run of them, `run` in length, lies in one block and in one stream.
struct Place {
  std::vector<int64_t> k, v; // offsets in bytes, one a run
};

struct Walk {
  static constexpr int64_t kPlaces = 16; // more tiles than are asked for ahead

  const pagegen_walk_args& a;
  int64_t stream; // tokens of a stream
  int64_t shift = 0; // run = 1 << shift
  Place places[kPlaces];
  vu sums[kSums] = {};
  uint32_t rest = 0;

  explicit Walk(const pagegen_walk_args& args) : a(args), stream(args.tile / args.streams) {
    while (stream % (int64_t(2) << shift) == 0 && a.block_size % (int64_t(2) << shift) == 0) shift++;
    for (Place& place : places) {
      place.k.resize(a.tile >> shift);
      place.v.resize(a.tile >> shift);
    }
  }

  void locate(const int32_t* table, int64_t begin, int64_t end, Place& place) const {
    for (int64_t i = 0, token = begin; token < std::min(begin + a.tile, end); i++, token += int64_t(1) << shift) {
      const int64_t block = table[token / a.block_size], slot = token % a.block_size;
      place.k[i] = block * a.k.block + slot * a.k.slot;
      place.v[i] = block * a.v.block + slot * a.v.slot;
    }
  }

  PAGEGEN_INLINE const char* row(const char* head, const std::vector<int64_t>& runs, int64_t slot,
                                  int64_t token) const {
    return head + runs[token >> shift] + (token & ((int64_t(1) << shift) - 1)) * slot;
  }

  // The first `live` tokens of a tile of K or of V, `streams` of them side by side; as many of another tile are asked
  // into L2, `asked` of them.
  template <bool AHEAD>
  PAGEGEN_INLINE void tile(const pagegen_walk_rows& r, const std::vector<int64_t>& here, int64_t live, int64_t head,
                           const std::vector<int64_t>& there, int64_t asked, int64_t asked_head) {
    const char* from = r.cache + head * r.head;
    const char* ahead = r.cache + asked_head * r.head;
    for (int64_t i = 0; i < stream; i++)
      for (int64_t s = 0; s < a.streams; s++) {
        const int64_t token = s * stream + i;
        if (AHEAD && token < asked) {
          const char* p = row(ahead, there, r.slot, token);
          for (int64_t at = 0; at < r.row_bytes; at += kLine) __builtin_prefetch(p + at, 0, 2);
        }
        if (token < live) rest += read_row(row(from, here, r.slot, token), r.row_bytes, sums);
      }
  }

  template <bool AHEAD>
  void item(const int32_t* table, int64_t begin, int64_t end, int64_t first_head, int64_t heads) {
    const int64_t units = (end - begin + a.tile - 1) / a.tile * heads;
    int64_t located = 0; // tiles
    for (int64_t u = 0; u < units; u++) {
      const int64_t next = std::min(u + a.ahead, units - 1), t = u / heads, n = next / heads;
      for (; located <= n; located++)
        locate(table, begin + located * a.tile, end, places[located % kPlaces]);
      const Place &here = places[t % kPlaces], &there = places[n % kPlaces];
      const int64_t live = std::min(a.tile, end - begin - t * a.tile);
      const int64_t asked = u + a.ahead < units ? std::min(a.tile, end - begin - n * a.tile) : 0;
      const int64_t head = first_head + u % heads, asked_head = first_head + next % heads;
      if (a.k.cache) tile<AHEAD>(a.k, here.k, live, head, there.k, asked, asked_head);
      if (a.v.cache) tile<AHEAD>(a.v, here.v, live, head, there.v, asked, asked_head);
    }
  }

  void run(int64_t sequence, int64_t split, int64_t first_head) {
    const int32_t* table = a.block_table + sequence * a.table_stride;
    const int64_t begin = split * a.split, end = std::min<int64_t>(a.seq_lens[sequence], begin + a.split);
    const int64_t heads = std::min(a.heads, a.num_heads - first_head);
    if (begin >= end) return;
    if (a.ahead > 0) item<true>(table, begin, end, first_head, heads);
    else item<false>(table, begin, end, first_head, heads);
  }
};

// Independent multiply-adds: latency times units is 8 on most CPUs, and all must stay in registers.
constexpr int kChains = std::min(16, kAccumulators);

template <class Step> double multiply_add(int64_t turns, int64_t num_threads, Step step) {
  double total = 0;
#pragma omp parallel num_threads((int)num_threads) reduction(+ : total)
  {
    volatile float seed = 0.5f; // unknown to the compiler
    vf sum[kChains];
    for (int i = 0; i < kChains; i++) sum[i] = splat(seed * i);
    const vf x = splat(seed), y = splat(seed * 0.25f);
    for (int64_t n = 0; n < turns; n++)
#pragma GCC unroll 16
      for (int i = 0; i < kChains; i++) sum[i] = step(sum[i], x, y);
    for (int i = 0; i < kChains; i++) total += sum_lanes(sum[i]);
  }
  return total;
}

} // namespace
} // namespace pagegen

// Reads `bytes` (a multiple of 64) front to back, each thread one part. Returns the sum of its 32-bit words.
extern "C" uint32_t pagegen_read(const void* memory, int64_t bytes, int64_t num_threads) {
  using namespace pagegen;
  uint32_t total = 0;
#pragma omp parallel num_threads((int)num_threads) reduction(+ : total)
  {
    const int64_t lines = bytes / kLine, thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t begin = lines * thread / threads * kLine, end = lines * (thread + 1) / threads * kLine;
    vu sums[kSums] = {};
    total += read_run((const char*)memory + begin, end - begin, sums);
    total += sum_words(sums);
  }
  return total;
}

// Reads every sequence's tokens through the block table and returns the sum of their 32-bit words. Items are (sequence,
// run of tokens, heads), taken by threads one after another, as a decode kernel's.
extern "C" uint32_t pagegen_walk(const pagegen_walk_args* args) {
  using namespace pagegen;
  const pagegen_walk_args& a = *args;
  int64_t longest = 0;
  for (int64_t s = 0; s < a.num_seqs; s++) longest = std::max<int64_t>(longest, a.seq_lens[s]);
  const int64_t splits = (longest + a.split - 1) / a.split, groups = (a.num_heads + a.heads - 1) / a.heads;
  uint32_t total = 0;
#pragma omp parallel num_threads((int)a.num_threads) reduction(+ : total)
  {
    Walk walk(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.num_seqs * splits * groups; i++)
      walk.run(i / (splits * groups), i / groups % splits, i % groups * a.heads);
    total += walk.rest + sum_words(walk.sums);
  }
  return total;
}

// Floating-point operations (a multiply-add is two) of one turn of one thread; 0: this CPU has no such instruction.
// kind 0: float32 multiply-adds; 1: products of bf16 pairs added to float32; 2: of four bytes each added to int32.
extern "C" int64_t pagegen_peak_flops(int64_t kind) {
  using namespace pagegen;
#if defined(PAGEGEN_BF16)
  if (kind == 1) return 4 * W * kChains;
#endif
#if defined(PAGEGEN_VNNI)
  if (kind == 2) return 8 * W * kChains;
#endif
  return kind == 0 ? 2 * W * kChains : 0;
}

// Does `turns` turns on every thread; the result only keeps the work from being left out.
extern "C" double pagegen_peak([[maybe_unused]] int64_t kind, int64_t turns, int64_t num_threads) {
  using namespace pagegen;
#if defined(PAGEGEN_BF16)
  if (kind == 1)
    return multiply_add(turns, num_threads, [](vf sum, vf x, vf y) __attribute__((always_inline)) {
      return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
    });
#endif
#if defined(PAGEGEN_VNNI)
  if (kind == 2)
    return multiply_add(turns, num_threads, [](vf sum, vf x, vf y) __attribute__((always_inline)) {
      return (vf)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
    });
#endif
  return multiply_add(turns, num_threads,
                      [](vf sum, vf x, vf y) __attribute__((always_inline)) { return fma(sum, x, y); });
}
