// Writing to and copying within a paged cache on CPUs, and reading memory to see how fast it is.
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
// Build: c++ -O3 -march=native -std=c++20 -fopenmp -ffp-contract=off -shared -fPIC
#pragma once

#include "vectors.hpp"

#include <algorithm>
#include <omp.h>
#include <vector>

struct pagegen_strides {
  int64_t block, slot, head;
};

// One of K and V: what is written, where to, and how it is quantised.
struct pagegen_rows {
  const void* rows; // null: this one is not written
  void* cache;
  const float* scale;
  const float* zero;
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

typedef uint8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t vn_any __attribute__((vector_size(W / 2), aligned(1), may_alias));
typedef int64_t vq __attribute__((vector_size(4 * W)));

struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct int4x2 { uint8_t bits; };

template <class To> constexpr bool kFloat8 = std::is_same_v<To, e4m3> || std::is_same_v<To, e5m2>;
template <class To> constexpr bool kPacked = std::is_same_v<To, int4x2>;

// ---- W float32 values as what a cache stores ------------------------------------------------------------

// float8 to nearest even: an addition whose last place is the smallest subnormal rounds those, integer arithmetic the
// rest. `kept` mantissa bits; the smallest normal is 2^-least.
template <int kept, int least> PAGEGEN_INLINE vi float8_bits(vf x, float largest) {
  constexpr int dropped = 23 - kept;
  const vf size = as_float(as_int(x) & 0x7fffffff);
  const vf limited = size < splat(largest) ? size : splat(largest); // of NaN the largest: no integer overflows
  const vi u = as_int(limited);
  const vi normal = (u + ((1 << (dropped - 1)) - 1) + ((u >> dropped) & 1) - ((126 - least) << 23)) >> dropped;
  constexpr float step = (float)(int64_t(1) << (23 - least - kept)); // its last place is 2^-(least + kept)
  const vi subnormal = as_int(limited + step) - as_int(splat(step));
  const vi code = u < splat((127 - least) << 23) ? subnormal : normal;
  return (x == x ? code : splat(0x7f)) | ((as_int(x) >> 24) & 0x80);
}

// to nearest even within low .. high; NaN is 0
PAGEGEN_INLINE vi integers(vf x, float low, float high) {
  const vf above = x > splat(low) ? x : splat(low);
  const vf limited = above < splat(high) ? above : splat(high);
  constexpr float shift = 12582912.0f; // 1.5 * 2^23: its last place is 1
  const vi rounded = as_int(limited + shift) - as_int(splat(shift));
  return x == x ? rounded : splat(0);
}

PAGEGEN_INLINE void store_cache(float* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(fp16* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(bf16* p, vf x) { store_float(p, x); }
PAGEGEN_INLINE void store_cache(e4m3* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(float8_bits<3, 6>(x, 448.0f), vb_any);
}
PAGEGEN_INLINE void store_cache(e5m2* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(float8_bits<2, 14>(x, 57344.0f), vb_any);
}
PAGEGEN_INLINE void store_cache(int8_t* p, vf x) {
  *(vb_any*)p = __builtin_convertvector(integers(x, -128.0f, 127.0f), vb_any);
}
PAGEGEN_INLINE void store_cache(int4x2* p, vf x) { // the lower half of 64 bits holds the even value
  const vq pair = (vq)(integers(x, -8.0f, 7.0f) & 0xf);
  *(vn_any*)p = __builtin_convertvector(pair | (pair >> 28), vn_any);
}

// ---- rows -----------------------------------------------------------------------------------------------

template <class From, class To>
void store_row(const From* from, To* to, int64_t n, const float* scale = nullptr, const float* zero = nullptr) {
  if constexpr (std::is_same_v<From, To>) {
    if (!scale && !zero) {
      std::memcpy((void*)to, from, n * sizeof(To));
      return;
    }
  }
  const vf divisor = splat(scale ? *scale : 1.0f);
  const auto quantised = [&](vf x) {
    if (scale) x = x / divisor;
    return zero ? x + splat(*zero) : x;
  };
  constexpr int packed = kPacked<To> ? 2 : 1;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_cache(to + i / packed, quantised(load_float(from + i)));
  if (i == n) return;
  alignas(64) From rest[W] = {};
  alignas(64) To converted[W];
  std::memcpy((void*)rest, from + i, (n - i) * sizeof(From));
  store_cache(converted, quantised(load_float(rest)));
  std::memcpy((void*)(to + i / packed), converted, (n - i) / packed * sizeof(To));
}

template <class T> void widen(const T* from, float* to, int64_t n) { store_row<T, float>(from, to, n); }

// Turns the first 2 * half columns of a row by the angles of one position (RoFormer, arXiv 2104.09864).
inline void rotate(float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half,
                   bool interleaved) {
  const int64_t apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i * step], b = x[i * step + apart];
    x[i * step] = a * cos[i] - b * sin[i];
    x[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

// What one thread needs to rotate a row: the row and one position's angles in float32, and the row rounded.
struct Turning {
  std::vector<float> row, cos, sin;
  std::vector<char> rounded;

  explicit Turning(const pagegen_write_args& a)
      : row(a.k.dim), cos(a.rotary_half), sin(a.rotary_half), rounded(a.k.dim * sizeof(float)) {}

  template <class T> const T* turn(const pagegen_write_args& a, const T* from) {
    widen(from, row.data(), a.k.dim);
    if (a.interleaved) rotate(row.data(), cos.data(), sin.data(), a.rotary_half, true);
    else rotate(row.data(), cos.data(), sin.data(), a.rotary_half, false);
    T* to = (T*)rounded.data();
    store_row<float, T>(row.data(), to, a.k.dim);
    return to;
  }
};

template <class T> void load_angles(const pagegen_write_args& a, int64_t t, Turning& turning) {
  const int64_t position = std::clamp<int64_t>(a.positions[t], 0, a.max_position - 1);
  widen((const T*)a.cos + position * a.cos_stride, turning.cos.data(), a.rotary_half);
  widen((const T*)a.sin + position * a.sin_stride, turning.sin.data(), a.rotary_half);
}

template <class T> void rotate_queries(const pagegen_write_args& a, int64_t t, Turning& turning) {
  for (int64_t h = 0; h < a.num_q_heads; h++) {
    const T* turned = turning.turn(a, (const T*)a.q + t * a.q_token_stride + h * a.q_head_stride);
    T* to = (T*)a.rotated + t * a.rotated_token_stride + h * a.rotated_head_stride;
    std::memcpy((void*)to, turned, a.k.dim * sizeof(T));
  }
}

inline int64_t offset(pagegen_strides s, int64_t block, int64_t place, int64_t head) {
  return block * s.block + place * s.slot + head * s.head;
}

template <class From, class To>
void write_rows(const pagegen_write_args& a, const pagegen_rows& r, int64_t t, Turning* turning) {
  const int64_t block = a.slots[t] / a.block_size, place = a.slots[t] % a.block_size;
  for (int64_t h = 0; h < a.num_kv_heads; h++) {
    const From* from = (const From*)r.rows + t * r.token_stride + h * r.head_stride;
    To* to = (To*)r.cache + offset(r.cache_strides, block, place, h);
    const float* scale = r.scale ? r.scale + offset(r.scale_strides, block, place, h) : nullptr;
    const float* zero = r.zero ? r.zero + offset(r.zero_strides, block, place, h) : nullptr;
    store_row(turning ? turning->turn(a, from) : from, to, r.dim, scale, zero);
  }
}

template <class From, class To> void write_token(const pagegen_write_args& a, int64_t t, Turning* turning) {
  if (a.slots[t] < 0) return;
  write_rows<From, To>(a, a.k, t, turning);
  if (a.v.rows) write_rows<From, To>(a, a.v, t, nullptr);
}

using Writer = void (*)(const pagegen_write_args&, int64_t, Turning*);
template <class From>
constexpr Writer kWritersFrom[7] = {write_token<From, float>, write_token<From, fp16>,   write_token<From, bf16>,
                                    write_token<From, e4m3>,  write_token<From, e5m2>,   write_token<From, int8_t>,
                                    write_token<From, int4x2>};
constexpr const Writer* kWriters[3] = {kWritersFrom<float>, kWritersFrom<fp16>, kWritersFrom<bf16>};

using Turner = void (*)(const pagegen_write_args&, int64_t, Turning&);
constexpr Turner kAngles[3] = {load_angles<float>, load_angles<fp16>, load_angles<bf16>};
constexpr Turner kQueries[3] = {rotate_queries<float>, rotate_queries<fp16>, rotate_queries<bf16>};

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

// Stores k and v at their slots; with `cos`, also rotates q and k first: q into `rotated`, every row of it.
extern "C" void pagegen_write_kv(const pagegen_write_args* args) {
  using namespace pagegen;
  const pagegen_write_args& a = *args;
  const Writer write = kWriters[a.source_dtype][a.cache_dtype];
  const int64_t bytes = a.num_tokens * (a.num_kv_heads * (a.k.dim + a.v.dim) + a.num_q_heads * a.k.dim) * 2;
  const int threads = bytes < kSmallBytes ? 1 : (int)a.num_threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (a.cos) {
      Turning turning(a);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < a.num_tokens; t++) {
        kAngles[a.angle_dtype](a, t, turning);
        kQueries[a.q_dtype](a, t, turning);
        write(a, t, &turning);
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < a.num_tokens; t++) write(a, t, nullptr);
    }
  }
}

extern "C" void pagegen_copy_blocks(const pagegen_copy_args* args) {
  const pagegen_copy_args& a = *args;
  const int64_t bytes = a.num_pairs * a.block_size * a.num_kv_heads * (a.head_dim + a.v_head_dim) * a.element_bytes;
  const int threads = bytes < pagegen::kSmallBytes ? 1 : (int)a.num_threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < a.num_pairs; i++) {
    pagegen::copy_block((char*)a.k_cache, a.k_strides, a, a.head_dim, i);
    if (a.v_cache) pagegen::copy_block((char*)a.v_cache, a.v_strides, a, a.v_head_dim, i);
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
