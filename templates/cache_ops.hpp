// Writing to and copying within a paged cache on CPUs, and reading memory to see how fast it is.
//
// Layouts, in elements; every last dimension has stride 1, all other strides are arguments:
//   k, v        [num_tokens, num_kv_heads, head_dim or v_head_dim]
//   k, v cache  [num_blocks, block_size, num_kv_heads, head_dim or v_head_dim]
//   slot        block * block_size + place in the block; a negative slot skips the token
//
// Build: c++ -O3 -march=native -std=c++20 -fopenmp -ffp-contract=off -shared -fPIC
#pragma once

#include "vectors.hpp"

#include <algorithm>
#include <omp.h>

struct pagegen_strides {
  int64_t block, slot, head;
};

struct pagegen_write_args {
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  const int64_t* slots;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  pagegen_strides k_strides, v_strides;
  int64_t num_tokens, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t source_dtype, cache_dtype; // 0 float32, 1 float16, 2 bfloat16
  int64_t num_threads;
};

struct pagegen_copy_args {
  void* k_cache;
  void* v_cache;
  const int64_t* pairs; // [num_pairs, 2]: source block, target block; no target is a source
  pagegen_strides k_strides, v_strides;
  int64_t num_pairs, num_kv_heads, head_dim, v_head_dim, block_size;
  int64_t element_bytes;
  int64_t num_threads;
};

namespace pagegen {
namespace {

template <class From, class To> void copy_row(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy((void*)to, from, n * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + W <= n; i += W) store_float(to + i, load_float(from + i));
    if (i == n) return;
    alignas(64) From rest[W] = {};
    alignas(64) To converted[W];
    std::memcpy((void*)rest, from + i, (n - i) * sizeof(From));
    store_float(converted, load_float(rest));
    std::memcpy((void*)(to + i), converted, (n - i) * sizeof(To));
  }
}

template <class From, class To> void write_token(const pagegen_write_args& a, int64_t t) {
  const int64_t slot = a.slots[t];
  if (slot < 0) return;
  const int64_t block = slot / a.block_size, place = slot % a.block_size;
  const From* k = (const From*)a.k + t * a.k_token_stride;
  const From* v = (const From*)a.v + t * a.v_token_stride;
  To* to_k = (To*)a.k_cache + block * a.k_strides.block + place * a.k_strides.slot;
  To* to_v = (To*)a.v_cache + block * a.v_strides.block + place * a.v_strides.slot;
  for (int64_t h = 0; h < a.num_kv_heads; h++) {
    copy_row(k + h * a.k_head_stride, to_k + h * a.k_strides.head, a.head_dim);
    copy_row(v + h * a.v_head_stride, to_v + h * a.v_strides.head, a.v_head_dim);
  }
}

using Writer = void (*)(const pagegen_write_args&, int64_t);
constexpr Writer kWriters[3][3] = {
    {write_token<float, float>, write_token<float, fp16>, write_token<float, bf16>},
    {write_token<fp16, float>, write_token<fp16, fp16>, write_token<fp16, bf16>},
    {write_token<bf16, float>, write_token<bf16, fp16>, write_token<bf16, bf16>},
};

inline void copy_block(char* cache, pagegen_strides strides, const pagegen_copy_args& a, int64_t dim, int64_t pair) {
  const int64_t source = a.pairs[2 * pair] * strides.block, target = a.pairs[2 * pair + 1] * strides.block;
  for (int64_t s = 0; s < a.block_size; s++)
    for (int64_t h = 0; h < a.num_kv_heads; h++) {
      const int64_t at = s * strides.slot + h * strides.head;
      std::memcpy(cache + (target + at) * a.element_bytes, cache + (source + at) * a.element_bytes,
                  dim * a.element_bytes);
    }
}

constexpr int64_t kSmallBytes = 64 << 10; // below it, waking threads costs more than they save

} // namespace
} // namespace pagegen

extern "C" void pagegen_write_kv(const pagegen_write_args* args) {
  const pagegen_write_args& a = *args;
  const pagegen::Writer write = pagegen::kWriters[a.source_dtype][a.cache_dtype];
  const int64_t bytes = a.num_tokens * a.num_kv_heads * (a.head_dim + a.v_head_dim) * 2;
  const int threads = bytes < pagegen::kSmallBytes ? 1 : (int)a.num_threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < a.num_tokens; t++) write(a, t);
}

extern "C" void pagegen_copy_blocks(const pagegen_copy_args* args) {
  const pagegen_copy_args& a = *args;
  const int64_t bytes = a.num_pairs * a.block_size * a.num_kv_heads * (a.head_dim + a.v_head_dim) * a.element_bytes;
  const int threads = bytes < pagegen::kSmallBytes ? 1 : (int)a.num_threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < a.num_pairs; i++) {
    pagegen::copy_block((char*)a.k_cache, a.k_strides, a, a.head_dim, i);
    pagegen::copy_block((char*)a.v_cache, a.v_strides, a, a.v_head_dim, i);
  }
}

// Reads `bytes` (a multiple of 4096) front to back, each thread its share, and returns a sum so that no
// compiler can leave the reading out. What a decode kernel could reach at best.
extern "C" int64_t pagegen_read(const void* memory, int64_t bytes, int64_t num_threads) {
  using pagegen::vi;
  int64_t total = 0;
#pragma omp parallel for schedule(static) num_threads((int)num_threads) reduction(+ : total)
  for (int64_t page = 0; page < bytes / 4096; page++) {
    const int32_t* p = (const int32_t*)((const char*)memory + page * 4096);
    vi sum[4] = {};
    for (int i = 0; i < 1024; i += 4 * pagegen::W)
      for (int j = 0; j < 4; j++) sum[j] ^= pagegen::load(p + i + j * pagegen::W);
    sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
    for (int j = 0; j < pagegen::W; j++) total += sum[0][j];
  }
  return total;
}
