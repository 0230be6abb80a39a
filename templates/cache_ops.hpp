// Writing to and copying within a paged cache on CPUs; merge.hpp comes along in the same library. The parts:
// quantise.hpp (what a cache stores), rotate.hpp, copies.hpp.
//
// Layouts; every last dimension has stride 1, all other strides are arguments, in elements:
//   k, v        [num_tokens, num_kv_heads, head_dim or v_head_dim]
//   q, rotated  [num_tokens, num_q_heads, head_dim]
//   k, v cache  [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]; int4: two a byte, low nibble first
//   scale, zero [num_blocks, block_size, num_kv_heads]; an absent one is null
//   cos, sin    [max_position, rotary_half]
//   slot        block * block_size + place in the block; a negative slot skips the token
//
// What a cache stores: value / scale + zero, both rounded to float32, then to the nearest value that the cache's type
// has, ties to even. Types of 8 and 4 bits saturate, infinities too; NaN stays NaN in float8 and is 0 in integers.
//
// Build: c++ -O2 -fpeel-loops -std=c++20 -fopenmp -ffp-contract=off -fwrapv -shared -fPIC -march=native
#pragma once

#include "copies.hpp"
#include "merge.hpp"
#include "quantise.hpp"
#include "rotate.hpp"

#include <algorithm>
#include <cstdlib>
#include <omp.h>

struct pagegen_strides {
  int64_t block, slot, head;
};

// One of K and V: what is written, where to, and how it is quantised.
struct pagegen_rows {
  const void* rows; // null: this one is not written
  void* cache;
  const float* scale;
  const float* zero; // int8 and int4 alone
  int64_t token_stride, head_stride;
  pagegen_strides cache_strides, scale_strides, zero_strides;
  int64_t dim;
};

struct pagegen_write_args {
  pagegen_rows k, v;
  const int64_t* slots;
  int64_t num_tokens, num_kv_heads, block_size;
  int64_t source_dtype, cache_dtype; // 0 float32, 1 float16, 2 bfloat16; a cache also 3 e4m3, 4 e5m2, 5 int8, 6 int4
  int64_t num_threads;
  // rotation; cos is null for a plain write
  const void* q;
  void* rotated;
  const int64_t* positions;
  const void* cos;
  const void* sin;
  int64_t q_token_stride, q_head_stride, rotated_token_stride, rotated_head_stride, cos_stride, sin_stride;
  int64_t num_q_heads, max_position, rotary_half, interleaved;
  int64_t q_dtype, angle_dtype;
};

struct pagegen_copy_args {
  void* k_cache;
  void* v_cache;        // null: K alone
  const int64_t* pairs; // [num_pairs, 2]: source block, target block; no target is a source
  pagegen_strides k_strides, v_strides;
  int64_t num_pairs, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t element_bytes;
  int64_t num_threads;
};

namespace pagegen {
namespace {

struct Range {
  int64_t begin, end;
};
inline Range share(int64_t size, int64_t part, int64_t parts) {
  return {size * part / parts, size * (part + 1) / parts};
}

inline int64_t offset(pagegen_strides s, int64_t block, int64_t place, int64_t head) {
  return block * s.block + place * s.slot + head * s.head;
}

// What is the same for every token of a call.
struct Writing {
  const pagegen_write_args& a;
  int64_t from_bytes, to_bytes;
  bool same;        // the cache holds the type of the rows
  bool past_caches; // converted rows too: the lines of a token are made in L1 first

  Writing(const pagegen_write_args& args, bool past)
      : a(args), from_bytes(kBytes[a.source_dtype]), to_bytes(kBytes[a.cache_dtype]),
        same(a.source_dtype == a.cache_dtype), past_caches(past) {}

  bool as_it_is(const pagegen_rows& r) const { return same && !r.scale && !r.zero; }

  // A thread's own memory: a position's angles, and rows of one token, rotated and as they are stored.
  struct Scratch {
    float* angles;
    char* turned;
    char* stored;
    Scratch(const Scratch&) = delete;
    explicit Scratch(const pagegen_write_args& a) {
      const int64_t angle_bytes = 2 * whole_vectors(a.rotary_half) * sizeof(float);
      const int64_t turned_bytes = a.cos ? a.num_kv_heads * a.k.dim * sizeof(float) : 0;
      const int64_t stored_bytes = a.num_kv_heads * std::max(a.k.dim, a.v.dim) * sizeof(float);
      angles = (float*)std::aligned_alloc(64, (angle_bytes + turned_bytes + stored_bytes + 63) / 64 * 64);
      std::memset(angles, 0, angle_bytes);
      turned = (char*)angles + angle_bytes;
      stored = turned + turned_bytes;
    }
    ~Scratch() { std::free(angles); }
  };

  char* place(const pagegen_rows& r, int64_t slot, int64_t head) const {
    return (char*)r.cache + offset(r.cache_strides, slot / a.block_size, slot % a.block_size, head) * to_bytes;
  }
  const char* source(const pagegen_rows& r, int64_t t, int64_t head) const {
    return (const char*)r.rows + (t * r.token_stride + head * r.head_stride) * from_bytes;
  }

  // Rows of heads of one token, which lie `from_stride` bytes apart.
  void store(const pagegen_rows& r, int64_t slot, Range heads, const char* from, int64_t from_stride,
             const Scratch& own) const {
    const Axis one{1, 0, 0};
    const int64_t count = heads.end - heads.begin, apart = r.cache_strides.head * to_bytes;
    char* to = place(r, slot, heads.begin);
    if (as_it_is(r)) return copy_box(to, from, one, {count, from_stride, apart}, r.dim * to_bytes, past_caches);
    const int64_t width = a.cache_dtype == kInt4 ? r.dim / 2 : r.dim;
    const int64_t block = slot / a.block_size, in_block = slot % a.block_size;
    const auto factor = [&](const float* f, pagegen_strides s) {
      return f ? f + offset(s, block, in_block, heads.begin) : nullptr;
    };
    const RowWriter write = kRowWriters[a.source_dtype][r.scale || r.zero][a.cache_dtype];
    const int64_t to_stride = past_caches ? width : r.cache_strides.head;
    write({from, past_caches ? own.stored : to, factor(r.scale, r.scale_strides), factor(r.zero, r.zero_strides),
           from_stride / from_bytes, to_stride, r.scale_strides.head, r.zero_strides.head, count, r.dim});
    if (past_caches) copy_box(to, own.stored, one, {count, width * to_bytes, apart}, width * to_bytes, true);
  }
  void store(const pagegen_rows& r, int64_t t, Range heads, const Scratch& own) const {
    store(r, a.slots[t], heads, source(r, t, heads.begin), r.head_stride * from_bytes, own);
  }

  // Tokens [t, t + count) of consecutive slots in one block.
  void copy_run(const pagegen_rows& r, int64_t t, int64_t count) const {
    copy_box(place(r, a.slots[t], 0), source(r, t, 0),
             {count, r.token_stride * to_bytes, r.cache_strides.slot * to_bytes},
             {a.num_kv_heads, r.head_stride * to_bytes, r.cache_strides.head * to_bytes}, r.dim * to_bytes,
             past_caches);
  }
  int64_t run(int64_t t, int64_t end) const {
    const int64_t slot = a.slots[t], most = std::min(end - t, a.block_size - slot % a.block_size);
    int64_t count = 1;
    while (count < most && a.slots[t + count] == slot + count) count++;
    return count;
  }
  void copy_tokens(Range tokens) const {
    for (int64_t t = tokens.begin; t < tokens.end;) {
      const bool skipped = a.slots[t] < 0;
      const int64_t count = skipped ? 1 : run(t, tokens.end);
      if (!skipped) copy_run(a.k, t, count);
      if (!skipped && a.v.rows) copy_run(a.v, t, count);
      t += count;
    }
  }

  void rotate_token(int64_t t, Range q_heads, Range heads, const Scratch& own) const {
    const int64_t position = std::clamp<int64_t>(a.positions[t], 0, a.max_position - 1), half = a.rotary_half;
    kAngles[a.angle_dtype](a.cos, position * a.cos_stride, half, own.angles);
    kAngles[a.angle_dtype](a.sin, position * a.sin_stride, half, own.angles + whole_vectors(half));
    const int64_t q_bytes = kBytes[a.q_dtype], width = a.k.dim * from_bytes;
    for (int64_t h = q_heads.begin; h < q_heads.end; h++) {
      const char* from = (const char*)a.q + (t * a.q_token_stride + h * a.q_head_stride) * q_bytes;
      char* to = (char*)a.rotated + (t * a.rotated_token_stride + h * a.rotated_head_stride) * q_bytes;
      kTurners[a.q_dtype][a.interleaved](from, to, a.k.dim, own.angles, half);
    }
    if (a.slots[t] < 0) return;
    for (int64_t h = heads.begin; h < heads.end; h++)
      kTurners[a.source_dtype][a.interleaved](source(a.k, t, h), own.turned + (h - heads.begin) * width, a.k.dim,
                                              own.angles, half);
    store(a.k, a.slots[t], heads, own.turned, width, own);
    if (a.v.rows) store(a.v, t, heads, own);
  }
  void write_token(int64_t t, Range heads, const Scratch& own) const {
    if (a.slots[t] < 0) return;
    store(a.k, t, heads, own);
    if (a.v.rows) store(a.v, t, heads, own);
  }

  // What one thread does. Tokens are divided into `pieces`, each of some heads.
  void work(int64_t part, int64_t parts, int64_t pieces) const {
    const Range units = share(a.num_tokens * pieces, part, parts);
    if (!a.cos && pieces == 1 && as_it_is(a.k) && as_it_is(a.v)) return copy_tokens(units);
    const Scratch own(a);
    for (int64_t u = units.begin; u < units.end; u++) {
      const Range heads = share(a.num_kv_heads, u % pieces, pieces);
      if (a.cos) rotate_token(u / pieces, share(a.num_q_heads, u % pieces, pieces), heads, own);
      else write_token(u / pieces, heads, own);
    }
  }
};

} // namespace
} // namespace pagegen

// Stores k and v at their slots; with `cos`, also rotates q and k first: q into `rotated`, every row of it.
extern "C" void pagegen_write_kv(const pagegen_write_args* args) {
  using namespace pagegen;
  const pagegen_write_args& a = *args;
  const int64_t bytes = a.num_tokens * (a.num_kv_heads * (a.k.dim + a.v.dim) + a.num_q_heads * a.k.dim) * 2;
  const int threads = bytes < kSmallBytes ? 1 : (int)a.num_threads;
  const int64_t pieces = a.num_tokens < 8 * threads && threads > 1 ? a.num_kv_heads : 1;
  const Writing writing(a, bytes >= kSmallBytes);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    writing.work(omp_get_thread_num(), omp_get_num_threads(), pieces);
    if (writing.past_caches) fence_writes();
  }
}

extern "C" void pagegen_copy_blocks(const pagegen_copy_args* args) {
  using namespace pagegen;
  const pagegen_copy_args& a = *args;
  const int64_t bytes = a.num_pairs * a.block_size * a.num_kv_heads * (a.head_dim + a.v_head_dim) * a.element_bytes;
  const int threads = bytes < kSmallBytes ? 1 : (int)a.num_threads;
  const auto copy_block = [&](char* cache, pagegen_strides s, int64_t dim, const int64_t* pair) {
    const int64_t e = a.element_bytes;
    copy_box(cache + pair[1] * s.block * e, cache + pair[0] * s.block * e, {a.block_size, s.slot * e, s.slot * e},
             {a.num_kv_heads, s.head * e, s.head * e}, dim * e, bytes >= kSmallBytes);
  };
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < a.num_pairs; i++) {
      copy_block((char*)a.k_cache, a.k_strides, a.head_dim, a.pairs + 2 * i);
      if (a.v_cache) copy_block((char*)a.v_cache, a.v_strides, a.v_head_dim, a.pairs + 2 * i);
    }
    fence_writes();
  }
}

